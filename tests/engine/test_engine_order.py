"""In which order an engine works, and who makes room for whom, over the fake model."""

from __future__ import annotations

from cluster.engine.events import Token
from tests.engine.drive import reserve_and_start, run
from tests.engine.fakes import Pool, generate_alone, make_engine, make_request

PROMPT = list(range(10, 21))  # three blocks of four


def test_decode_rows_first_then_chunks_in_order() -> None:
    engine, runner = make_engine(Pool(max_num_batched_tokens=10), prefix_caching=False)
    engine.add(make_request("old", [1, 2], 9, priority=5, ignore_eos=True), stop_after_first_token=False)
    engine.step()
    for name, priority in (("late", 3), ("urgent", 1), ("middle", 2)):
        engine.add(make_request(name, PROMPT, 9, priority=priority, ignore_eos=True), stop_after_first_token=False)
    for _ in range(4):
        engine.step()
    assert runner.steps[1:] == [
        [("old/0", 1), ("urgent/0", 9)],
        [("old/0", 1), ("urgent/0", 2), ("middle/0", 7)],
        [("urgent/0", 1), ("old/0", 1), ("middle/0", 4), ("late/0", 4)],
        [("urgent/0", 1), ("middle/0", 1), ("old/0", 1), ("late/0", 7)],
    ]


def test_nobody_overtakes_the_first_that_waits_for_blocks() -> None:
    engine, runner = make_engine(Pool(num_blocks=8, num_reserved_blocks=0))
    engine.add(make_request("holds", PROMPT, 9, ignore_eos=True), stop_after_first_token=False)
    engine.step()
    engine.add(make_request("big", [3] * 22, 2, priority=1, ignore_eos=True), stop_after_first_token=False)
    engine.add(make_request("small", [4], 2, priority=2, ignore_eos=True), stop_after_first_token=False)
    assert engine.reserve(make_request("reserved", [5], 2, priority=3), "fake", 1) is None
    run(engine)
    entered = list(dict.fromkeys(key for step in runner.steps for key, _ in step))
    assert entered == ["holds/0", "big/0", "small/0"]


def test_admission_leaves_the_reserve_to_those_who_grow() -> None:
    engine, _ = make_engine(Pool(num_blocks=8, num_reserved_blocks=3))
    engine.add(make_request("a", PROMPT, 8, ignore_eos=True), stop_after_first_token=False)
    engine.step()
    engine.add(make_request("b", PROMPT[::-1], 8, priority=1, ignore_eos=True), stop_after_first_token=False)
    engine.step()
    assert engine.load().num_seqs_waiting == 1  # 4 of 8 blocks are held, 3 needed: that would leave 1
    run(engine)
    assert engine.load().num_preemptions == 0


def test_prefills_need_no_reserve_among_themselves() -> None:
    engine, _ = make_engine(Pool(num_blocks=6, num_reserved_blocks=3, max_num_batched_tokens=64))
    for name in "ab":
        engine.add(make_request(name, PROMPT, 8, ignore_eos=True), stop_after_first_token=True)
    run(engine)
    assert engine.load().num_blocks_leased == 6


def test_reserved_sequences_take_seats() -> None:
    engine, _ = make_engine(Pool(max_num_seqs=2))
    assert engine.reserve(make_request("a", PROMPT), "fake", len(PROMPT)) is not None
    reserve_and_start(engine, make_request("b", PROMPT, ignore_eos=True))
    assert engine.reserve(make_request("c", PROMPT), "fake", len(PROMPT)) is None
    engine.abort("a/0")
    assert engine.reserve(make_request("c", PROMPT), "fake", len(PROMPT)) is not None


def test_the_last_in_order_makes_room_and_comes_back() -> None:
    engine, runner = make_engine(Pool(num_blocks=10, num_reserved_blocks=0))
    requests = [make_request(name, [index] * 8, 20, priority=index, ignore_eos=True) for index, name in enumerate("abc")]
    for request in requests:
        engine.add(request, stop_after_first_token=False)
    events = run(engine)
    for request in requests:
        assert [e.output.token_id for key, e in events if key == request.key and isinstance(e, Token)] == generate_alone(request, 120)[0]
    finished = [key for key, event in events if isinstance(event, Token) and event.finish_reason is not None]
    assert finished == ["a/0", "b/0", "c/0"]
    assert engine.load().num_preemptions > 0
    sizes = {len(step) for step in runner.steps}
    assert {1, 2, 3} <= sizes


def test_making_room_for_the_first_leaves_it_the_blocks_it_shares() -> None:
    engine, _ = make_engine(Pool(num_blocks=8, num_reserved_blocks=0, max_num_batched_tokens=32))
    first = make_request("first", [*range(4), *range(10, 18)], 20, priority=1, ignore_eos=True)
    sharer = make_request("sharer", [*range(4), *range(20, 28)], 20, priority=2, ignore_eos=True)
    for request in (first, sharer):
        engine.add(request, stop_after_first_token=False)
        events = engine.step()
    engine.add(make_request("earlier", [9] * 4, 29, priority=0, ignore_eos=True), stop_after_first_token=False)
    while engine.load().num_blocks_swapped < 6:
        events += engine.step()
    engine.abort("earlier/0")
    assert engine.reserve(make_request("reserved", [8] * 19, 4, priority=-1), "other", 19) is not None, "leaves one of the blocks needed"
    events += engine.step()
    assert not engine.has_work
    engine.check_integrity()
    engine.abort("reserved/0")
    events += run(engine)
    assert [e.output.token_id for key, e in events if key == sharer.key and isinstance(e, Token)] == generate_alone(sharer, 120)[0]
