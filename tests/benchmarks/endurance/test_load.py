"""What a soak asks, and how it counts what comes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice

import pytest

from benchmarks.endurance.load import SoakLoad
from benchmarks.endurance.traffic import SoakRequest, Traffic
from benchmarks.load.answer import LoadError
from benchmarks.load.lengths import Fixed, Uniform
from benchmarks.load.requests import LoadRequest

TRAFFIC = Traffic(Uniform(10, 200), Uniform(1, 30), 1000, cancel_share=0.35, grpc=True)


def asked(num: int, seed: int = 0, traffic: Traffic = TRAFFIC) -> list[SoakRequest]:
    return list(islice(traffic.requests(seed), num))


def test_the_same_seed_asks_the_same() -> None:
    assert asked(200) == asked(200)
    assert asked(200) != asked(200, seed=1)


def test_every_kind_has_its_share_and_its_prompts() -> None:
    requests = asked(2000)
    kinds = Counter(request.kind for request in requests)
    assert kinds.keys() == {"completions", "chat", "completions_whole", "chat_whole", "grpc", "bad"}
    assert kinds["bad"] < kinds["chat_whole"] < kinds["grpc"]
    for request in requests:
        assert isinstance(request.request.prompt, str) == request.kind.startswith("chat")
    assert all(request.kind != "grpc" for request in asked(500, traffic=Traffic(Fixed(5), Fixed(5), 1000, 0.3, grpc=False)))


def test_cancels_come_at_every_scale_and_never_on_mistakes() -> None:
    requests = asked(4000)
    moments_s = [request.cancel_after_s for request in requests if request.cancel_after_s is not None]
    assert all(request.cancel_after_s is None for request in requests if request.kind == "bad")
    assert len(moments_s) / len(requests) == pytest.approx(0.35 * 0.95, abs=0.03)
    for low_s, high_s in ((0.002, 0.02), (0.02, 0.2), (0.2, 2.0), (2.0, 8.0)):
        assert sum(low_s <= moment_s < high_s for moment_s in moments_s) > 50


def test_some_prompts_share_a_beginning() -> None:
    beginnings = Counter(request.request.prompt[:8] for request in asked(1000) if not isinstance(request.request.prompt, str))
    shared = [count for count in beginnings.values() if count > 1]
    assert len(shared) == 8
    assert 0.2 < sum(shared) / beginnings.total() < 0.4


def request(kind: str, cancel_after_s: float | None = None) -> SoakRequest:
    return SoakRequest(kind, LoadRequest("a", 1), cancel_after_s, 0)  # type: ignore[arg-type]


async def test_it_counts_answers_cancels_and_errors_by_kind() -> None:
    closed = []

    async def answer(_: SoakRequest) -> None:
        await asyncio.sleep(0)

    async def hang(_: SoakRequest) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def fail(_: SoakRequest) -> None:
        raise LoadError("http_500", "a bug")

    load = SoakLoad({"completions": answer, "grpc": hang, "chat": fail})
    requests = [request("completions", 30.0), request("grpc", 0.01), request("chat"), request("completions"), request("chat")]
    await load.open_loop(iter(requests), rate=1000.0, seed=0, duration_s=60)
    counts = load.counts
    assert (counts.num_sent, counts.num_running, counts.num_answered) == (5, 0, 2)
    assert counts.cancelled == {"grpc": 1}
    assert closed == [True]
    assert counts.errors == {"chat: http_500": 2}
    assert counts.first_errors == {"chat: http_500": "a bug"}


async def test_the_open_loop_waits_for_nobody_and_ends_in_time() -> None:
    gate, many = asyncio.Event(), asyncio.Event()

    async def wait(_: SoakRequest) -> None:
        if load.counts.num_running == 20:
            many.set()
        await gate.wait()

    load = SoakLoad({"completions": wait})
    running = asyncio.create_task(load.open_loop(iter(lambda: request("completions"), None), rate=500.0, seed=0, duration_s=0.2))
    await many.wait()
    gate.set()
    await running
    assert load.counts.num_answered == load.counts.num_sent > 50


async def test_the_closed_loop_keeps_its_users_busy() -> None:
    most = 0

    async def work(_: SoakRequest) -> None:
        nonlocal most
        most = max(most, load.counts.num_running)
        await asyncio.sleep(0.01)

    load = SoakLoad({"completions": work})
    rate = await load.closed_loop(iter(lambda: request("completions"), None), concurrency=4, duration_s=0.2)
    assert most == 4
    assert rate > 0
    assert load.counts.num_running == 0
