"""The fixed load of `serve_mixed`: equal work in every run, or no result."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.mixed_load import MixedLoad, WrongAnswer, figures
from tests.benchmarks.fake_openai import FakeOpenAI, Script, served

LOAD = MixedLoad(num_requests=3, num_prompt_tokens=5, num_output_tokens=4, vocab_size=1000, seed=7, num_runs=2)
WARM_UP = Script(usage=8)


async def measure(fake: FakeOpenAI) -> tuple[str, list[dict[str, float]]]:
    async with served(fake) as url:
        model, results = await asyncio.to_thread(LOAD.measure, url)
    return model, [figures(result) for result in results]


async def test_all_at_once_and_each_run_with_other_prompts() -> None:
    fake = FakeOpenAI(WARM_UP, WARM_UP, Script([(0.5, "ab"), (0.02, "cd")], usage=4))
    model, runs = await measure(fake)
    assert model == "tiny"
    assert len(runs) == 2
    assert len({tuple(seen.body["prompt"]) for seen in fake.seen}) == 2 + 2 * 3
    first = fake.seen[2:5]
    assert max(seen.received_s for seen in first) < min(seen.written_s[0] for seen in first)
    assert all(run["itl_p99_s"] < run["ttft_p50_s"] for run in runs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(Script(usage=2), "asked for"), (Script(ending="error"), "worker lost"), (Script(status=429), "the queue is full")],
)
async def test_a_run_with_a_wrong_answer_is_no_result(wrong: Script, message: str) -> None:
    with pytest.raises(WrongAnswer, match=message):
        await measure(FakeOpenAI(WARM_UP, WARM_UP, Script(), wrong))
