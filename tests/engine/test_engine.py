"""What an engine accepts, how sequences end, and who holds the blocks, over the fake model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.engine.events import Allocated, Computed, Failed, Token
from cluster.errors import ClientGone, ContextTooLong, InternalError, InvalidRequest
from cluster.types import FinishReason, Request, TokenOutput
from tests.engine.drive import num_held, run
from tests.engine.fakes import EOS, VOCAB_SIZE, Pool, generate_alone, make_engine, make_request, next_token

PROMPT = list(range(10, 21))  # three blocks of four


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (make_request("r", []), InvalidRequest, "prompt"),
        (make_request("r", [VOCAB_SIZE]), InvalidRequest, "prompt"),
        (make_request("r", [-1]), InvalidRequest, "prompt"),
        (make_request("r", PROMPT, 0), InvalidRequest, "max_tokens"),
        (make_request("r", PROMPT, stop_token_ids=(VOCAB_SIZE,)), InvalidRequest, "stop_token_ids"),
        (make_request("r", PROMPT, logit_bias=((VOCAB_SIZE, 1.0),)), InvalidRequest, "logit_bias"),
        (make_request("r", [1] * 120), ContextTooLong, "prompt"),
        (make_request("r", PROMPT, 50), ContextTooLong, "max_tokens"),
    ],
)
def test_refuses_by_name(request_: Request, error: type[Exception], param: str) -> None:
    engine, _ = make_engine(Pool(num_blocks=10))
    with pytest.raises(error) as caught:
        engine.add(request_, stop_after_first_token=False)
    assert caught.value.param == param  # type: ignore[attr-defined]
    with pytest.raises(error):
        engine.reserve(request_, "fake", request_.num_prompt_tokens)
    assert engine.load().live_keys == () and not engine.has_work


def test_a_sequence_that_fills_the_pool_exactly_is_served() -> None:
    engine, _ = make_engine(Pool(num_blocks=10, num_swap_slots=0))
    request = make_request("r", PROMPT, 30, ignore_eos=True)  # the last token's KV is never computed: 40 tokens in 10 blocks
    engine.add(request, stop_after_first_token=False)
    assert [e.output.token_id for _, e in run(engine) if isinstance(e, Token)] == generate_alone(request, 120)[0]


def test_a_prefill_needs_blocks_for_its_prompt_only() -> None:
    engine, _ = make_engine(Pool(num_blocks=3))
    engine.add(make_request("r", PROMPT, 100, ignore_eos=True), stop_after_first_token=True)
    run(engine)
    assert engine.load().num_blocks_leased == 3


def test_a_key_is_in_use_while_its_lease_lives() -> None:
    engine, _ = make_engine()
    request = make_request("r", PROMPT, ignore_eos=True)
    engine.add(request, stop_after_first_token=True)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(request, stop_after_first_token=True)
    run(engine)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.reserve(request, "fake", len(PROMPT))
    engine.release_lease(request.key)
    engine.add(request, stop_after_first_token=True)
    engine.add(replace(request, attempt=1), stop_after_first_token=True)


# ---- how sequences end -------------------------------------------------------------------------------------------------


def test_finish_reasons() -> None:
    first = next_token(PROMPT)
    cases = [
        (make_request("stop", PROMPT, 9, stop_token_ids=(first,)), FinishReason.STOP, 1),
        (make_request("length", PROMPT, 1, ignore_eos=True), FinishReason.LENGTH, 1),
        (make_request("min", PROMPT, 3, stop_token_ids=(first,), min_tokens=2, ignore_eos=True), FinishReason.LENGTH, 3),
        (make_request("context", PROMPT, 500, ignore_eos=True), FinishReason.LENGTH, 30 - len(PROMPT)),
    ]
    for request, reason, num_tokens in cases:
        engine, _ = make_engine(max_model_len=30)
        engine.add(request, stop_after_first_token=False)
        tokens = [event for _, event in run(engine) if isinstance(event, Token)]
        assert [token.finish_reason for token in tokens] == [None] * (num_tokens - 1) + [reason], request.request_id


def test_eos_ends_unless_it_is_ignored() -> None:
    prompt = next([a, b] for a in range(VOCAB_SIZE) for b in range(VOCAB_SIZE) if next_token([a, b]) == EOS)
    for ignore_eos, num_tokens in ((False, 1), (True, 5)):
        engine, _ = make_engine()
        engine.add(make_request("r", prompt, 5, ignore_eos=ignore_eos), stop_after_first_token=False)
        assert sum(isinstance(event, Token) for _, event in run(engine)) == num_tokens


def test_a_prefill_that_ends_at_its_first_token_leases_nothing() -> None:
    engine, _ = make_engine()
    engine.add(make_request("r", PROMPT, 1), stop_after_first_token=True)
    *_, (_, token) = run(engine)
    assert isinstance(token, Token) and token.finish_reason is not None
    assert num_held(engine) == 0


def test_events_of_a_chunked_prefill() -> None:
    engine, _ = make_engine(Pool(max_num_batched_tokens=8))
    engine.add(make_request("r", list(range(20)), 2, ignore_eos=True), stop_after_first_token=False)
    events = [event for _, event in run(engine)]
    allocated, *computed, first, second = events
    assert isinstance(allocated, Allocated) and len(allocated.blocks) == 5 and allocated.num_cached_tokens == 0
    assert computed == [Computed(8), Computed(16), Computed(20)]
    assert isinstance(first, Token) and isinstance(second, Token)
    assert allocated.at_s <= first.step_started_s <= second.step_started_s


# ---- reservations, leases, aborts --------------------------------------------------------------------------------------


def test_start_needs_a_reservation() -> None:
    engine, _ = make_engine()
    for key in ("nobody/0", "r/0"):
        with pytest.raises(ClientGone):
            engine.start(key, TokenOutput(1))
        engine.add(make_request("r", PROMPT), stop_after_first_token=False)
        engine.abort("r/0")


def test_the_ticket_must_be_of_the_prompt() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.reserve(make_request("r", PROMPT), "fake", len(PROMPT) + 1)
    assert caught.value.param == "num_tokens"


def test_abort_in_every_state() -> None:
    engine, _ = make_engine(Pool(num_blocks=10, num_reserved_blocks=0, max_num_seqs=3))
    engine.add(make_request("leased", [9], 9, priority=0, ignore_eos=True), stop_after_first_token=True)
    engine.step()
    for index, name in enumerate(("running", "preempted")):
        engine.add(make_request(name, [index] * 12, 25, priority=index, ignore_eos=True), stop_after_first_token=False)
    while not engine.load().num_blocks_swapped:
        engine.step()
    engine.add(make_request("queued", PROMPT, priority=9), stop_after_first_token=False)
    load = engine.load()
    assert (load.num_seqs_running, load.num_seqs_waiting, load.num_blocks_leased) == (1, 2, 1)
    for name in ("leased", "preempted", "queued", "running", "never"):
        for _ in range(2):
            engine.abort(f"{name}/0")
            engine.check_integrity()
    assert engine.reserve(make_request("reserved", PROMPT), "fake", len(PROMPT)) is not None
    engine.abort("reserved/0")
    assert num_held(engine) == 0 and engine.load().live_keys == ()


def test_an_engine_that_waits_for_a_lease_has_no_work_until_it_ends() -> None:
    engine, _ = make_engine(Pool(num_blocks=4))
    engine.add(make_request("leased", PROMPT, ignore_eos=True), stop_after_first_token=True)
    run(engine)
    engine.add(make_request("waits", PROMPT[::-1], 1), stop_after_first_token=False)
    assert engine.has_work and engine.step() == [] and not engine.has_work
    engine.release_lease("leased/0")
    assert engine.has_work
    assert isinstance(run(engine)[-1][1], Token)


# ---- failures ----------------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_rows_and_spares_the_rest() -> None:
    engine, runner = make_engine(Pool(max_num_batched_tokens=11))
    spared = make_request("b", PROMPT, 5, priority=1, ignore_eos=True)
    engine.add(make_request("a", PROMPT, 5), stop_after_first_token=False)
    engine.add(spared, stop_after_first_token=False)
    runner.raises = [RuntimeError("no luck")]
    failed = [event for _, event in engine.step() if isinstance(event, Failed)]
    assert len(failed) == 1 and "no luck" in failed[0].message
    engine.check_integrity()
    assert num_held(engine) == 0
    assert [e.output.token_id for _, e in run(engine) if isinstance(e, Token)] == generate_alone(spared, 120)[0]


def test_a_step_that_succeeds_starts_the_count_of_failures_anew() -> None:
    engine, runner = make_engine()
    for round_ in range(3):
        runner.raises = [RuntimeError("no luck")] * 2
        for name in "abc":
            engine.add(make_request(f"{name}{round_}", PROMPT, 2, ignore_eos=True), stop_after_first_token=False)
            engine.step()
        run(engine)
    runner.raises = [RuntimeError("dead")] * 3
    for name in "de":
        engine.add(make_request(name, PROMPT, 2), stop_after_first_token=False)
        engine.step()
    engine.add(make_request("f", PROMPT, 2), stop_after_first_token=False)
    with pytest.raises(InternalError, match="dead"):
        engine.step()
