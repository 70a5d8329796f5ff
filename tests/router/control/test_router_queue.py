"""The router's queue at work: its order, its bounds, and what it says when it is full. No real time passes."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.errors import ClientGone, Overloaded
from tests.router.control.builders import (
    Cluster,
    answered,
    assert_empty,
    full_cluster,
    key,
    load,
    names,
    prefill_load,
    ready_cluster,
    request,
    settle,
)

# ---- order


async def test_the_queue_is_served_in_order_of_priority_and_arrival() -> None:
    cluster = full_cluster()
    tasks = cluster.admit(
        request("low", priority=5), request("n1"), request("n2"), request("high", priority=-1), request("higher", priority=-2)
    )
    await settle()
    assert names(tasks) == []
    order: list[str] = []
    for task in tasks:
        task.add_done_callback(lambda done: order.append(done.get_name()))
    cluster.report(load("d"))
    await settle()
    assert order == ["higher", "high", "n1", "n2", "low"]


async def test_nothing_goes_past_a_head_that_waits_for_credit() -> None:
    cluster = Cluster()
    cluster.report(prefill_load(), load("d", num_blocks_owned=80))  # 10 of 90 left
    big, small = cluster.admit(request("big", 200), request("small", 16))
    await settle()
    assert names([big, small]) == []
    cluster.report(load("d"))
    await settle()
    assert names([big, small]) == ["big", "small"]


async def test_prefill_credit_holds_prompts_back_until_the_one_before_is_done() -> None:
    cluster = ready_cluster()  # 256 tokens ahead at most
    tasks = cluster.admit(*(request(f"r{i}", 128) for i in range(5)))
    await settle()
    assert names(tasks) == ["r0", "r1"]
    cluster.router.prefill_done("r0")
    await settle()
    assert names(tasks) == ["r0", "r1", "r2"]
    cluster.router.finish("r1")
    await settle()
    assert names(tasks) == ["r0", "r1", "r2", "r3"]
    cluster.router.finish("r4")
    assert isinstance((await asyncio.gather(tasks[4], return_exceptions=True))[0], ClientGone)


async def test_resubmission_keeps_its_place_and_passes_the_bounds() -> None:
    cluster = full_cluster(max_queued_requests=2)
    waiting = cluster.admit(request("a"), request("b"))
    await settle()
    with pytest.raises(Overloaded):
        await cluster.place(request("c"))
    again = cluster.admit(request("old", order_key=key(1.0, 7)))
    await settle()
    assert len(cluster.router.queue) == 3
    cluster.report(load("d", num_seqs_running=7))
    await settle()
    assert names([*waiting, *again]) == ["old"]
    assert again[0].result().order_key == key(1.0, 7)
    for name in ("a", "b"):
        cluster.router.finish(name)
    await asyncio.gather(*waiting, return_exceptions=True)


# ---- bounds and overload


async def test_200_at_once_on_a_queue_of_64_with_one_slow_worker() -> None:
    cluster = Cluster(max_queued_requests=64, report_timeout_s=1000)
    cluster.report(prefill_load(max_num_batched_tokens=10_000), load("d"))  # 8 sequences at a time
    rng = random.Random(1)
    requests = [request(f"r{i}", priority=rng.choice((-1, 0, 1))) for i in range(200)]
    tasks = cluster.admit(*requests)
    await settle()
    refused = [task for task in tasks if task.done() and task.exception() is not None]
    assert all(isinstance(task.exception(), Overloaded) for task in refused)
    assert len(refused) == 200 - 64 - 8
    assert all(task.exception().retry_after_s >= 1.0 for task in refused)  # type: ignore[union-attr]
    assert cluster.sample("baton_router_rejections_total", reason="queue_requests") == 128
    assert len(names(tasks)) == 8

    queued = [request_ for request_, task in zip(requests, tasks, strict=True) if not task.done()]
    cancelled = rng.sample(queued, 20)
    for task in tasks:
        if task.get_name() in {each.request_id for each in cancelled}:
            task.cancel()
    await settle()
    assert len(cluster.router.queue) == 44

    served = names(tasks)
    order = list(served)
    while len(order) < 8 + 44:
        cluster.clock.advance(1.0)
        cluster.router.finish(served.pop(0))
        await settle()
        fresh = [name for name in names(tasks) if name not in order]
        assert len(fresh) == 1
        order += fresh
        served += fresh
    left = [each for each in queued if each not in cancelled]
    assert order[8:] == [each.request_id for each in sorted(left, key=lambda each: each.priority)]
    for name in served:
        cluster.router.finish(name)
    assert_empty(cluster)


async def test_bounded_by_tokens() -> None:
    cluster = full_cluster(max_queued_tokens=100)
    first, second = cluster.admit(request("a", 60), request("b", 60))
    await settle()
    assert not first.done()
    assert isinstance(second.exception(), Overloaded)
    assert cluster.sample("baton_router_rejections_total", reason="queue_tokens") == 1
    first.cancel()
    await settle()
    assert_empty(cluster)


async def drain_slowly(cluster: Cluster, count: int) -> None:
    """One request leaves the queue every two seconds."""
    tasks = cluster.admit(*(request(f"slow{i}") for i in range(count)))
    await settle()
    for number in range(count):
        cluster.clock.advance(2.0)
        cluster.report(prefill_load(), load("d", num_seqs_running=7))
        await answered(tasks[number])
        cluster.report(load("d", num_seqs_running=8))
        cluster.router.finish(f"slow{number}")


async def test_retry_after_follows_the_drain_rate() -> None:
    cluster = full_cluster(max_queued_requests=10, report_timeout_s=60)
    await drain_slowly(cluster, 9)
    waiting = cluster.admit(*(request(f"w{i}") for i in range(10)))
    await settle()
    with pytest.raises(Overloaded) as caught:
        await cluster.place(request("late"))
    assert caught.value.retry_after_s == pytest.approx(20.0)
    for task in waiting:
        task.cancel()
    await settle()
    assert_empty(cluster)


async def test_a_deadline_that_the_queue_cannot_meet_is_refused_early() -> None:
    cluster = full_cluster(report_timeout_s=60)
    await drain_slowly(cluster, 9)
    waiting = cluster.admit(*(request(f"w{i}") for i in range(5)))
    await settle()
    with pytest.raises(Overloaded, match="deadline"):
        await cluster.place(request("late", timeout_s=9.0))
    in_time = cluster.admit(request("in_time", timeout_s=11.0), request("urgent", timeout_s=9.0, priority=-1))
    await settle()
    assert not any(task.done() for task in in_time)
    for task in (*waiting, *in_time):
        task.cancel()
    await settle()
    assert_empty(cluster)
