"""Promise P5 over a real cluster: the stages that processes report sum to what the gateway measures, in responses and in metrics.

The unexplained rest is hops between processes: to be at most 2 ms or 1 %. On a machine that others use, each end of a hop waits for a
core, and no process can say how long. So a bare gRPC call to the gateway follows each request, and what the slowest of these took is
allowed on top for each round trip, up to a limit; and of many equal requests the best one must keep to the bound: what is reported wrongly
is wrong in all of them. That stages explain more than there was is never noise where the gateway's time holds theirs from end to end.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import httpx2
import pytest
import pytest_asyncio
from grpc import aio
from prometheus_client.parser import text_string_to_metric_families

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from tests.integration.served import Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

MODEL: Final = "smollm2-135m-instruct"
TO_FIRST_TOKEN: Final = ("gateway_s", "failed_attempts_s", "queue_s", "prefill_wait_s", "prefill_s")
TO_SECOND_TOKEN: Final = ("handoff_s", "declined_s", "transfer_s", "decode_wait_s", "first_step_s")
STAGES: Final = ("gateway", "queue", "prefill_wait", "prefill", "transfer", "decode_wait", "first_step")
MAX_UNEXPLAINED_S, MAX_UNEXPLAINED_SHARE = 0.002, 0.01
ROUNDING_S: Final = 5e-6  # responses round each stage to a microsecond
ROUND_TRIPS: Final = 2  # between processes, in each sum: to the router and to a worker; to a decode worker, and from it to prefill
MAX_HOPS_S: Final = 0.01  # however slow they are: a stage of tens of milliseconds that is left out must show


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer's own account, the client's TTFT, and a bare round trip right after it."""

    timings: dict[str, float]
    client_ttft_s: float
    hop_s: float


async def ask(served: Served, num_prompt_tokens: int, max_tokens: int, rng: random.Random) -> Timed:
    """A streamed completion of a prompt that no cache holds."""
    prompt = [rng.randrange(300, 30_000) for _ in range(num_prompt_tokens)]
    options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
    timings: dict[str, float] = {}
    client_ttft_s = None
    async with httpx2.AsyncClient(timeout=120) as client:
        sent_s = time.monotonic()
        async with client.stream("POST", f"{served.url}/v1/completions", json=body, headers={"x-baton-timings": "1"}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    client_ttft_s = client_ttft_s or time.monotonic() - sent_s
                    timings = json.loads(line.removeprefix("data: ")).get("timings") or timings
    assert client_ttft_s is not None
    return Timed(timings, client_ttft_s, await hop(served))


async def hop(served: Served) -> float:
    """What a gRPC call takes that does nothing, on a connection that is open."""
    async with aio.insecure_channel(served.grpc_target) as channel:
        stub = InferenceStub(channel)
        await stub.GetModel(pb.GetModelRequest())
        asked_s = time.monotonic()
        await stub.GetModel(pb.GetModelRequest())
        return time.monotonic() - asked_s


def check_sums(answers: Sequence[Timed]) -> None:
    """Of equal requests.

    The second token's time is from one message to the next, of two processes or of one. A first one that is late makes it shorter than its
    stages, and the TTFT longer by as much: so both together must hold their stages in every answer, and it alone in most.
    """
    hops_s = min(ROUND_TRIPS * max(answer.hop_s for answer in answers), MAX_HOPS_S)
    for sum_name, stages in (("ttft", TO_FIRST_TOKEN), ("second_token", TO_SECOND_TOKEN)):
        if f"{sum_name}_s" not in answers[0].timings:
            continue
        rests_s, excesses_s = [], []
        for answer in answers:
            whole_s, rest_s = answer.timings[f"{sum_name}_s"], answer.timings[f"{sum_name}_unexplained_s"]
            assert sum(answer.timings[stage] for stage in stages) + rest_s == pytest.approx(whole_s, abs=ROUNDING_S)
            rests_s.append(rest_s)
            excesses_s.append(rest_s - max(MAX_UNEXPLAINED_S, MAX_UNEXPLAINED_SHARE * whole_s) - hops_s)
        print(f"{sum_name}: unexplained {[f'{1000 * rest_s:.1f}' for rest_s in rests_s]} ms, {1000 * hops_s:.1f} ms allowed for hops")
        assert min(excesses_s) <= 0, [answer.timings for answer in answers]
        least_s = min(rests_s) if sum_name == "ttft" else median(rests_s) + hops_s
        assert least_s > -MAX_UNEXPLAINED_S, f"stages explain more than there was: {[answer.timings for answer in answers]}"
    for answer in answers:
        rest_s = answer.timings["ttft_unexplained_s"] + answer.timings.get("second_token_unexplained_s", 0.0)
        assert rest_s > -MAX_UNEXPLAINED_S, f"stages explain more than there was to the second token: {answer.timings}"
    assert all(answer.client_ttft_s > answer.timings["ttft_s"] for answer in answers)


async def metrics(served: Served) -> dict[str, tuple[float, float]]:
    """Count and sum of `baton_stage_seconds`, by stage, and of `baton_ttft_seconds` as `ttft`."""
    text = (await served.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("stage", "ttft")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name in ("baton_stage_seconds", "baton_ttft_seconds")
        for sample in family.samples
    }
    prefixes = dict.fromkeys(STAGES, "baton_stage_seconds") | {"ttft": "baton_ttft_seconds"}
    return {name: (samples.get((f"{p}_count", name), 0.0), samples.get((f"{p}_sum", name), 0.0)) for name, p in prefixes.items()}


def check_metrics(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], answers: Sequence[Timed]) -> None:
    """The histograms hold these answers, all of them and with their own times."""
    for name in (*STAGES, "ttft"):
        count, total_s = (new - old for new, old in zip(after[name], before[name], strict=True))
        assert count == len(answers), name
        assert total_s == pytest.approx(sum(answer.timings[f"{name}_s"] for answer in answers), abs=ROUNDING_S * len(answers)), name


@pytest.fixture(scope="module")
def application(serve_url: str) -> Iterator[Served]:
    with serving(serve_url, "timed") as served:
        yield served


@pytest_asyncio.fixture
async def served(application: Served) -> AsyncIterator[Served]:
    await application.await_ready()
    await ask(application, 20, 2, random.Random(-1))  # connections and first kernels
    yield application
    await application.await_balance()


async def test_prompts_of_one_chunk_and_of_many(served: Served) -> None:
    """Every stage is some answer's longest here or below, so none can be misreported unnoticed."""
    rng = random.Random(0)
    before = await metrics(served)
    short = [await ask(served, 20, 3, rng) for _ in range(12)]
    long = [await ask(served, 1300, 3, rng) for _ in range(6)]  # three steps of prefill
    check_sums(short)
    check_sums(long)
    assert all(answer.timings["transfer_s"] > 0 for answer in long)
    check_metrics(before, await metrics(served), short + long)


async def test_requests_that_wait_for_others(served: Served) -> None:
    rng = random.Random(1)
    before = await metrics(served)
    answers = await asyncio.gather(*(ask(served, 700, 3, rng) for _ in range(8)))
    check_sums(answers)
    waits_s = sorted(answer.timings["queue_s"] + answer.timings["prefill_wait_s"] for answer in answers)
    assert waits_s[-1] > 2 * min(answer.timings["prefill_s"] for answer in answers), "the last one waited for more than two prompts"
    for answer in answers:
        assert answer.timings["router_queue_s"] <= answer.timings["queue_s"] + ROUNDING_S, "the router's own account is a part"
    check_metrics(before, await metrics(served), answers)


async def test_an_answer_of_one_token_has_no_second(served: Served) -> None:
    rng = random.Random(2)
    before = await metrics(served)
    answers = [await ask(served, 20, 1, rng) for _ in range(12)]
    check_sums(answers)
    for answer in answers:
        assert "second_token_s" not in answer.timings
        assert answer.timings["transfer_s"] == answer.timings["first_step_s"] == 0
    check_metrics(before, await metrics(served), answers)


async def test_one_worker_that_does_both(serve_url: str) -> None:
    rng = random.Random(3)
    with serving(serve_url, "timed-alone", mode="colocated") as alone:
        await alone.await_ready()
        await ask(alone, 20, 2, rng)
        before = await metrics(alone)
        short = [await ask(alone, 20, 3, rng) for _ in range(12)]
        beside = await asyncio.gather(*(ask(alone, 600, 3, rng) for _ in range(8)))
        check_sums(short)
        check_sums(beside)
        assert all(answer.timings["transfer_s"] == answer.timings["handoff_s"] == 0 for answer in short)
        check_metrics(before, await metrics(alone), [*short, *beside])


@pytest.mark.parametrize("hop_s", [0.001, 1.0])
async def test_the_check_finds_a_stage_that_is_left_out(hop_s: float) -> None:
    right = {"ttft_s": 1.0, "ttft_unexplained_s": 0.001} | dict.fromkeys(TO_FIRST_TOKEN, 0.0) | {"prefill_s": 0.999}
    check_sums([Timed(right, 1.01, hop_s)])
    for left_out in (
        {"prefill_s": 0.97, "ttft_unexplained_s": 0.03},  # tens of milliseconds
        {"prefill_s": 0.97},  # and not said
        {"prefill_s": 1.01, "ttft_unexplained_s": -0.01},  # counted twice
    ):
        with pytest.raises(AssertionError):
            check_sums([Timed({**right, **left_out}, 1.01, hop_s)] * 3)


async def test_the_check_knows_late_messages_from_stages_that_are_wrong() -> None:
    stages = dict.fromkeys((*TO_FIRST_TOKEN, *TO_SECOND_TOKEN), 0.0) | {"prefill_s": 1.0, "first_step_s": 0.025}

    def timed(late_s: float, second_rest_s: float) -> Timed:
        """`late_s`: of the first message."""
        first = {"ttft_s": 1.0 + late_s, "ttft_unexplained_s": late_s}
        second = {"second_token_s": 0.025 + second_rest_s, "second_token_unexplained_s": second_rest_s}
        return Timed({**stages, **first, **second}, 1.1, 0.001)

    exact, late = timed(0.0, 0.0), timed(0.02, -0.02)
    check_sums([exact, exact, late])
    with pytest.raises(AssertionError):
        check_sums([exact, late, late])
    with pytest.raises(AssertionError):
        check_sums([exact, exact, timed(0.0, -0.02)])
