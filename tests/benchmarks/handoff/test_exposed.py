"""How late the second token comes, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.handoff.exposed import OVERLAPS, Plan, ask, turned
from benchmarks.handoff.exposed_figures import HEADER, Exposed, Seen
from benchmarks.handoff.long_context import long_context
from benchmarks.load.answer import LoadError
from benchmarks.load.trace import Chunk
from tests.benchmarks.fake_inference import FakeInference, Script, serving


def chunks(arrivals: Sequence[tuple[float, int]]) -> list[Chunk]:
    return [Chunk(arrived_s, num_chars=3, num_tokens=num_tokens) for arrived_s, num_tokens in arrivals]


def test_a_second_token_that_waits_for_its_kv() -> None:
    seen = Seen.of(10.0, chunks([(11.0, 1), (11.07, 1), (11.09, 1), (11.11, 1), (11.19, 1), (11.21, 1)]))
    assert seen.ttft_s == pytest.approx(1.0)
    assert seen.step_s == pytest.approx(0.02), "the median: one slow step does not count"
    assert seen.exposed_s == pytest.approx(0.05)


def test_tokens_that_come_together_are_steps_each() -> None:
    seen = Seen.of(0.0, chunks([(1.0, 1), (1.1, 3), (1.12, 1), (1.16, 2), (1.18, 1)]))
    assert seen.step_s == pytest.approx(0.02)
    assert seen.exposed_s == pytest.approx(0.1 - 3 * 0.02)


def test_messages_without_tokens_are_none() -> None:
    assert Seen.of(0.0, chunks([(1.0, 1), (1.01, 0), (1.03, 1), (1.05, 1), (1.07, 1)])) == Seen.of(
        0.0, chunks([(1.0, 1), (1.03, 1), (1.05, 1), (1.07, 1)])
    )


@pytest.mark.parametrize("arrivals", [[(1.0, 2), (1.1, 1), (1.2, 1), (1.3, 1)], [(1.0, 1), (1.1, 1), (1.2, 1)]])
def test_an_answer_that_tells_nothing_is_refused(arrivals: list[tuple[float, int]]) -> None:
    with pytest.raises(ValueError, match="first token by itself"):
        Seen.of(0.0, chunks(arrivals))


def test_figures_are_medians() -> None:
    on = tuple(Seen(ttft_s=2.0, exposed_s=exposed_s, step_s=0.02) for exposed_s in (0.001, 0.004, 0.9))
    off = tuple(Seen(ttft_s=1.0, exposed_s=exposed_s, step_s=0.02) for exposed_s in (0.02, 0.01, -0.5))
    found = Exposed("nixl", 2048, on, off)
    assert found.ratio == pytest.approx(0.4)
    assert all(len(row) == len(HEADER) for row in found.rows())
    assert found.rows()[0][:6] == ["nixl", "2048", "on", "2000 ms", "4.00 ms", "0.20%"]
    record = json.loads(json.dumps(found.record()))
    assert record["on"]["exposed_s"] == 0.004 and record["off"]["exposed_of_ttft"] == 0.01
    assert len(record["off"]["requests"]) == 3


def test_nothing_exposed_has_no_ratio() -> None:
    quiet = (Seen(1.0, 0.0, 0.02),)
    assert Exposed("grpc", 512, quiet, quiet).ratio is None
    assert Exposed("grpc", 512, quiet, quiet).rows()[0][-1] == "-"


def test_each_setting_goes_first_in_every_other_round() -> None:
    assert [turned(OVERLAPS, number)[0] for number in (1, 2, 3, 4)] == [True, False, True, False]


PLAN = Plan(Path("none"), (), port=0, lengths=(5, 9), output_tokens=5, num_rounds=3, seed=0)


def answer(second_s: float) -> Script:
    """Five tokens, the second after `second_s`."""
    return Script([(0.0, "a", 1), (second_s, "b", 1), (0.02, "c", 1), (0.02, "d", 1), (0.02, "e", 1)])


async def test_two_servers_are_asked_in_turns() -> None:
    on, off = FakeInference(answer(0.05)), FakeInference(answer(0.4))
    async with serving(on) as on_target, serving(off) as off_target:
        found = await ask(PLAN, "fake", {True: on_target, False: off_target})
    assert {key: len(seen) for key, seen in found.items()} == {(length, overlap): 3 for length in (5, 9) for overlap in OVERLAPS}
    for fake in (on, off):
        assert [len(request.token_ids.ids) for request in fake.seen] == [5, 9] * 4, "the first two warm up"
        assert all((request.max_tokens, request.ignore_eos) == (5, True) for request in fake.seen)
    prompts = {tuple(request.token_ids.ids[:5]) for fake in (on, off) for request in fake.seen}
    assert len(prompts) == 16, "no cache knows one"
    for length in PLAN.lengths:
        exposed = Exposed("fake", length, tuple(found[length, True]), tuple(found[length, False]))
        assert exposed.ratio is not None and exposed.ratio < 0.6


async def test_an_answer_that_is_too_short_fails_by_its_reason() -> None:
    fake = FakeInference(Script([(0.0, "a", 1), (0.0, "b", 1)]))
    async with serving(fake) as target:
        with pytest.raises(LoadError, match="two messages more"):
            await ask(PLAN, "fake", {True: target, False: target})


def test_a_longer_context_has_the_same_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 8192, "hidden_size": 3}')
    (folder / "model.gguf").write_bytes(b"weights")
    with long_context(folder, 8192) as (same, own):
        assert (same, own) == (folder, None)
    with long_context(folder, 8216) as (longer, own):
        assert own == 8192 and longer.name == "model"
        assert json.loads((longer / "config.json").read_text()) == {"max_position_embeddings": 8216, "hidden_size": 3}
        assert (longer / "model.gguf").read_bytes() == b"weights"
    assert not longer.exists() and (folder / "model.gguf").exists()
