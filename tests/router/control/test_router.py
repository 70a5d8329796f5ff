"""The router as a whole: order, bounds, deadlines, cancels, redirects, lost workers and gateways. No real time passes."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import (
    ClientGone,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    NoCapacity,
    Overloaded,
    StaleEpoch,
)
from cluster.types import Placement, WorkerRole, WorkerState
from router.control.messages import Heartbeat, LiveRequest, Phase, Redirect
from router.control.metrics import RouterMetrics
from router.control.router import Router
from tests.router.control.builders import COLOCATED, Cluster, answered, key, load, names, prefill_load, request, settle


def ready_cluster(**config: Any) -> Cluster:
    cluster = Cluster(**config)
    cluster.report(prefill_load(), load("d"))
    return cluster


def full_cluster(**config: Any) -> Cluster:
    """Its one decode worker has room for nothing."""
    cluster = Cluster(**config)
    cluster.report(prefill_load(), load("d", num_seqs_running=8))
    return cluster


def prefill_of(placement: Placement) -> str:
    assert placement.prefill is not None
    return placement.prefill.incarnation


def assert_empty(cluster: Cluster) -> None:
    books = cluster.router.books()
    assert (books.faults, books.requests) == ((), ())
    assert not any(books.held.values()), books.held
    assert cluster.router.queue.num_tokens == 0


async def test_a_placement_names_both_workers() -> None:
    cluster = ready_cluster()
    placement = await cluster.place(request("r"))
    assert placement.prefill is not None
    assert (placement.prefill.endpoint, placement.prefill.incarnation) == ("p:1", "p#1")
    assert (placement.decode.endpoint, placement.decode.worker_id) == ("d:1", "d")
    assert (placement.router_epoch, placement.order_key, placement.queue_time_s) == (1, key(1010.0, 1), 0.0)
    assert cluster.router.live.num_by_phase() == {"prefill": 1, "decode": 0}
    cluster.router.prefill_done("r")
    assert cluster.router.live.num_by_phase() == {"prefill": 0, "decode": 1}
    cluster.router.finish("r")
    assert_empty(cluster)


async def test_colocated_names_one_worker() -> None:
    cluster = Cluster(COLOCATED)
    cluster.report(load("c", WorkerRole.COLOCATED))
    placement = await cluster.place(request("r"))
    assert placement.prefill is None
    assert placement.decode.worker_id == "c"


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


# ---- deadlines and cancels


async def test_an_expired_item_leaves_the_queue() -> None:
    cluster = full_cluster()
    task = cluster.admit(request("r", timeout_s=2.0))[0]
    await settle()
    cluster.clock.advance(1.9)
    cluster.router.sweep()
    await settle()
    assert not task.done()
    cluster.clock.advance(0.1)
    cluster.router.sweep()
    await settle()
    assert isinstance(task.exception(), DeadlineExceeded)
    assert_empty(cluster)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
async def test_a_deadline_in_the_past(timeout_s: float) -> None:
    with pytest.raises(DeadlineExceeded):
        await ready_cluster().place(request("r", timeout_s=timeout_s))


async def test_cancel_in_the_moment_of_the_answer_ends_the_placement() -> None:
    cluster = full_cluster()
    task = cluster.admit(request("r"))[0]
    await settle()
    cluster.report(load("d"))
    assert "r" in cluster.router.live  # the answer is set, its task has not run
    task.cancel()
    await settle()
    assert task.cancelled()
    assert_empty(cluster)


async def test_a_report_between_cancel_and_its_delivery_places_nothing() -> None:
    cluster = full_cluster()
    task = cluster.admit(request("r"))[0]
    await settle()
    task.cancel()
    cluster.report(load("d"))
    await settle()
    assert task.cancelled()
    assert_empty(cluster)


async def test_admitting_a_placed_request_replaces_its_placement() -> None:
    cluster = ready_cluster()
    cluster.report(load("e"))
    first = await cluster.place(request("r"))
    again = await cluster.place(request("r", order_key=first.order_key, exclude=(first.decode.incarnation,)))
    assert len(cluster.router.live) == 1
    assert again.decode.worker_id != first.decode.worker_id
    cluster.router.finish("r")
    cluster.router.finish("r")
    cluster.router.prefill_done("r")
    assert_empty(cluster)


async def test_admitting_a_queued_request_replaces_it() -> None:
    cluster = full_cluster()
    first = cluster.admit(request("r"))[0]
    await settle()
    second = cluster.admit(request("r"))[0]
    await settle()
    assert isinstance(first.exception(), ClientGone)
    assert len(cluster.router.queue) == 1
    second.cancel()
    await settle()
    assert_empty(cluster)


@pytest.mark.parametrize(("changes", "param"), [({"num_prompt_tokens": 0}, "prompt"), ({"max_tokens": 0}, "max_tokens")])
async def test_senseless_counts(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ready_cluster().place(replace(request("r"), **changes))
    assert caught.value.param == param


async def test_too_long_is_refused_at_once_and_after_recovery() -> None:
    with pytest.raises(ContextTooLong):
        await ready_cluster().place(request("r", 1000, 100))
    cluster = Cluster()
    task = cluster.admit(request("r", 1000, 100), request("fits"))
    await settle()
    cluster.report(prefill_load(), load("d"))
    await settle()
    assert isinstance(task[0].exception(), ContextTooLong)
    assert names(task) == ["fits"]


# ---- recovery and capacity


async def test_nothing_is_placed_while_recovering() -> None:
    cluster = Cluster()
    task = cluster.admit(request("r"))[0]
    await settle()
    assert cluster.router.snapshot()["state"] == "recovering"
    cluster.report(prefill_load())
    await settle()
    assert not task.done()
    cluster.report(load("d"))
    await answered(task)
    assert cluster.router.ready().ready


async def test_recovery_ends_by_time_with_what_is_there() -> None:
    cluster = Cluster({WorkerRole.PREFILL: 2, WorkerRole.DECODE: 1})
    cluster.report(prefill_load(), load("d"))
    task = cluster.admit(request("r"))[0]
    await settle()
    assert not task.done()
    assert not cluster.router.ready().ready
    cluster.clock.advance(1.0)
    cluster.router.sweep()
    await answered(task)


async def test_an_empty_pool_answers_no_capacity_after_a_bounded_wait_and_then_at_once() -> None:
    cluster = Cluster()
    cluster.report(prefill_load())
    waiting = cluster.admit(request("r"))[0]
    await settle()
    cluster.clock.advance(4.9)
    cluster.report(prefill_load())
    cluster.router.sweep()
    await settle()
    assert not waiting.done()
    cluster.clock.advance(0.1)
    cluster.router.sweep()
    await settle()
    assert isinstance(waiting.exception(), NoCapacity)
    with pytest.raises(NoCapacity, match="no decode worker is running") as caught:
        await cluster.place(request("s"))
    assert caught.value.retry_after_s is not None
    cluster.report(load("d"))
    await cluster.place(request("t"))


async def test_a_worker_that_comes_back_within_the_wait_serves_what_is_queued() -> None:
    cluster = ready_cluster()
    for _ in range(30):
        cluster.clock.advance(2.0)
        cluster.report(prefill_load(), load("d"))
        cluster.router.sweep()
    cluster.clock.advance(3.5)  # both silent
    task = cluster.admit(request("r"))[0]
    cluster.router.sweep()
    await settle()
    assert not task.done()
    cluster.report(prefill_load(incarnation="p#2"), load("d"))
    placement = await answered(task)
    assert placement.prefill is not None
    assert placement.prefill.incarnation == "p#2"


async def test_mismatched_pools_are_not_ready_and_say_why() -> None:
    cluster = Cluster()
    cluster.report(prefill_load(checkpoint="x"), load("d"))
    ready = cluster.router.ready()
    assert not ready.ready
    assert "checkpoint is x and c" in ready.reason
    assert cluster.router.snapshot()["reason"] == ready.reason
    cluster.clock.advance(5.0)
    cluster.report(prefill_load(checkpoint="x"), load("d"))
    with pytest.raises(NoCapacity, match="checkpoint"):
        await cluster.place(request("r"))


async def test_a_request_that_every_worker_failed_steps_aside_and_ends() -> None:
    cluster = ready_cluster(report_timeout_s=10)
    failed, other = cluster.admit(request("failed", exclude=("p#1",), order_key=key(0.0)), request("other"))
    await settle()
    assert names([failed, other]) == ["other"]
    cluster.clock.advance(5.0)
    cluster.router.sweep()
    await settle()
    assert isinstance(failed.exception(), NoCapacity)


async def test_a_request_that_every_worker_failed_is_served_by_the_next_life_of_one() -> None:
    cluster = ready_cluster()
    task = cluster.admit(request("r", exclude=("p#1",)))[0]
    await settle()
    cluster.report(prefill_load(incarnation="p#2"))
    assert prefill_of(await answered(task)) == "p#2"


async def test_a_worker_that_reports_after_a_failure_is_tried_again_when_there_is_no_other() -> None:
    cluster = ready_cluster()
    task = cluster.admit(request("r", exclude=("p#1", "d#1")))[0]
    await settle()
    cluster.clock.advance(0.5)
    cluster.report(prefill_load())
    await settle()
    assert not task.done()
    cluster.report(load("d"), load("e", num_blocks_owned=80))
    placement = await answered(task)
    assert (prefill_of(placement), placement.decode.incarnation) == ("p#1", "d#1")


async def test_another_worker_is_waited_for_before_a_failed_one_is_tried_again() -> None:
    cluster = ready_cluster()
    cluster.report(load("e", num_seqs_running=8))
    task = cluster.admit(request("r", exclude=("d#1",)))[0]
    await settle()
    cluster.clock.advance(0.5)
    cluster.report(load("d"))
    await settle()
    assert not task.done()
    cluster.report(load("e"))
    assert (await answered(task)).decode.incarnation == "e#1"


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING])
async def test_workers_that_do_not_run_get_nothing(state: WorkerState) -> None:
    cluster = Cluster()
    cluster.report(prefill_load(), load("a", state=state), load("b"))
    for name in ("r1", "r2"):
        assert (await cluster.place(request(name))).decode.worker_id == "b"


async def test_silent_workers_get_nothing_and_keep_their_placements() -> None:
    cluster = ready_cluster()
    await cluster.place(request("r"))
    cluster.clock.advance(4.0)
    cluster.report(prefill_load(), load("e"))
    cluster.router.sweep()
    assert "r" in cluster.router.live
    assert (await cluster.place(request("s"))).decode.worker_id == "e"
    cluster.clock.advance(31.0)
    cluster.report(prefill_load(), load("e", live_requests=("s/1",)))
    cluster.router.heartbeat(Heartbeat("g", ("r", "s")))
    cluster.router.sweep()
    assert "r" not in cluster.router.live
    assert "s" in cluster.router.live


# ---- lost workers


async def test_a_new_incarnation_ends_what_needed_the_old_one() -> None:
    cluster = ready_cluster()
    for name in ("in_prefill", "in_decode"):
        await cluster.place(request(name))
    cluster.router.prefill_done("in_decode")
    cluster.report(prefill_load(incarnation="p#2"))
    assert "in_prefill" not in cluster.router.live
    assert "in_decode" in cluster.router.live
    cluster.report(load("d", incarnation="d#2"))
    assert_empty(cluster)
    assert cluster.sample("baton_router_placements_ended_total", reason="worker_lost") == 2


async def test_late_reports_of_an_ended_life_are_ignored() -> None:
    cluster = ready_cluster()
    cluster.report(load("d", incarnation="d#2", num_seqs_running=1))
    cluster.report(load("d", incarnation="d#1", state=WorkerState.DRAINING))
    assert (await cluster.place(request("r"))).decode.incarnation == "d#2"


async def test_reports_out_of_order() -> None:
    cluster = ready_cluster()
    cluster.report(load("d", num_steps=9, num_seqs_running=8))
    cluster.report(load("d", num_steps=5))  # older: the worker was empty then
    task = cluster.admit(request("r"))[0]
    await settle()
    assert not task.done()
    cluster.report(load("d", num_steps=10, num_seqs_running=8, state=WorkerState.DRAINING))
    cluster.report(load("d", num_steps=10, state=WorkerState.RUNNING))
    await settle()
    assert not task.done()
    cluster.report(load("e"))
    assert (await answered(task)).decode.worker_id == "e"


# ---- redirects


async def test_redirect_moves_to_another_worker_at_once() -> None:
    cluster = ready_cluster()
    first = await cluster.place(request("r"))
    cluster.report(load("e"))
    second = await answered(asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 10.0))))
    assert second == replace(first, decode=second.decode)
    assert second.decode.worker_id == "e"
    assert [entry.request_id for entry in cluster.router.live.on("e#1")] == ["r"]
    assert cluster.router.live.on("d#1") == ()
    assert cluster.router.books().faults == ()
    assert cluster.sample("baton_router_redirects_total") == 1


async def test_redirect_without_another_worker_returns_to_the_same_after_the_time_it_asked_for() -> None:
    cluster = ready_cluster()
    await cluster.place(request("r"))
    task = asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 0.5)))
    cluster.report(load("full", num_seqs_running=8))
    await settle()
    cluster.clock.advance(0.4)
    cluster.router.sweep()
    await settle()
    assert not task.done()
    cluster.clock.advance(0.1)
    cluster.router.sweep()
    await settle()
    assert (await answered(task)).decode.worker_id == "d"


async def test_redirect_takes_credit_before_the_queue_does() -> None:
    cluster = ready_cluster()
    await cluster.place(request("r"))
    cluster.report(load("d", num_seqs_running=8, live_requests=("r/1",)))
    queued = cluster.admit(request("q", priority=-5))[0]
    redirect = asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 2.0)))
    await settle()
    cluster.report(load("e", num_seqs_running=7))
    await settle()
    assert (await answered(redirect)).decode.worker_id == "e"
    assert not queued.done()
    queued.cancel()
    await settle()


async def test_redirect_of_what_is_not_placed() -> None:
    with pytest.raises(StaleEpoch):
        await ready_cluster().router.redirect(Redirect("r", "d#1", 0.5))


async def test_redirect_ends_with_its_request_and_with_its_caller() -> None:
    cluster = ready_cluster()
    for name in ("r", "s"):
        await cluster.place(request(name))
    held = [asyncio.create_task(cluster.router.redirect(Redirect(name, "d#1", 2.0))) for name in ("r", "s")]
    await settle()
    cluster.router.finish("r")
    held[1].cancel()
    await settle()
    assert isinstance(held[0].exception(), StaleEpoch)
    assert len(cluster.router._redirects) == 0


async def test_redirect_when_the_kv_is_gone_with_its_prefill_worker() -> None:
    cluster = ready_cluster()
    await cluster.place(request("r"))
    cluster.router.prefill_done("r")
    cluster.report(load("e"), prefill_load(incarnation="p#2"))
    with pytest.raises(NoCapacity):
        await answered(asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 0.0))))


async def test_a_worker_that_cannot_be_reached_gets_nothing_until_it_reports() -> None:
    cluster = ready_cluster()
    await cluster.place(request("r"))
    redirect = asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 0.0, is_unreachable=True)))
    queued = cluster.admit(request("new"))[0]
    await settle()
    cluster.clock.advance(1.0)
    cluster.router.sweep()
    await settle()
    assert not redirect.done() and not queued.done()  # though its last report is young
    cluster.report(load("e"))
    assert (await answered(redirect)).decode.worker_id == "e"
    assert (await answered(queued)).decode.worker_id == "e"


async def test_a_redirect_with_no_worker_left_ends_after_the_capacity_wait() -> None:
    cluster = ready_cluster(capacity_wait_s=5.0)
    await cluster.place(request("r"))
    redirect = asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 0.0, is_unreachable=True)))
    for seconds in (4.9, 0.2):
        await settle()
        assert not redirect.done()
        cluster.report(prefill_load())
        cluster.clock.advance(seconds)
        cluster.router.sweep()
    await settle()
    assert isinstance(redirect.exception(), NoCapacity)


async def test_a_worker_that_was_out_of_reach_and_reports_gets_work_again() -> None:
    cluster = ready_cluster()
    await cluster.place(request("r"))
    redirect = asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 0.0, is_unreachable=True)))
    await settle()
    assert not redirect.done()
    cluster.report(load("d"))
    assert (await answered(redirect)).decode.worker_id == "d"


# ---- gateways


async def test_what_no_worker_holds_any_more_is_ended_long_before_its_gateway_is_silent() -> None:
    cluster = ready_cluster(gateway_timeout_s=100, report_timeout_s=100)
    for name in ("a", "b"):
        await cluster.place(request(name))
    cluster.router.prefill_done("b")
    for second in range(1, 6):
        cluster.clock.advance(1.0)
        cluster.report(prefill_load(live_requests=("a/1",)), load("d", live_requests=("b/1",) if second < 3 else ()))
        cluster.router.sweep()
        assert ("b" in cluster.router.live) == (second < 5), "a report later than two seconds after the last that lists it"
        assert "a" in cluster.router.live, "the prefill worker holds it"
    assert cluster.sample("baton_router_placements_ended_total", reason="orphaned") == 1


async def test_a_dead_gateway_is_quiet_before_its_placements_are_orphans() -> None:
    cluster = ready_cluster(gateway_timeout_s=100, report_timeout_s=100)
    await cluster.place(request("a"))
    cluster.clock.advance(2.0)
    cluster.router.heartbeat(Heartbeat("g", ("a",)))
    for seconds, is_live in ((2.4, True), (0.6, False)):
        cluster.clock.advance(seconds)
        cluster.report(prefill_load(), load("d"))
        cluster.router.sweep()
        assert ("a" in cluster.router.live) is is_live


async def test_what_a_live_gateway_holds_is_no_orphan_though_no_report_lists_it() -> None:
    """Its first step takes long, or its client is slow to read what the workers are done with: the books name it on both sides."""
    cluster = ready_cluster(report_timeout_s=100)
    for name in ("long step", "slow client"):
        await cluster.place(request(name))
    cluster.router.prefill_done("slow client")
    for _ in range(10):
        cluster.clock.advance(1.0)
        cluster.router.heartbeat(Heartbeat("g", ("long step", "slow client")))
        cluster.report(prefill_load(), load("d"))
        cluster.router.sweep()
        assert cluster.router.books().requests == ("long step", "slow client")
    assert cluster.sample("baton_router_placements_ended_total", reason="orphaned") == 0


async def test_a_gateway_that_was_only_slow_gets_its_orphans_back() -> None:
    cluster = ready_cluster(gateway_timeout_s=100, report_timeout_s=100)
    placement = await cluster.place(request("r"))
    for _ in range(3):
        cluster.clock.advance(1.0)
        cluster.report(prefill_load(), load("d"))
        cluster.router.sweep()
    assert_empty(cluster)
    assert cluster.router.heartbeat(Heartbeat("g", ("r",))).unknown_ids == ("r",)
    cluster.router.heartbeat(Heartbeat("g", ("r",), (LiveRequest(request("r"), placement, Phase.PREFILL),)))
    redirect = asyncio.create_task(cluster.router.redirect(Redirect("r", "d#1", 0.0)), name="redirect")
    assert (await answered(redirect)).decode.worker_id == "d"


async def test_what_a_silent_worker_may_still_hold_is_no_orphan() -> None:
    cluster = ready_cluster(gateway_timeout_s=100, report_timeout_s=100)
    await cluster.place(request("a"))
    for _ in range(5):
        cluster.clock.advance(1.0)
        cluster.report(prefill_load())  # nothing is heard of the decode worker
        cluster.router.sweep()
    assert "a" in cluster.router.live


async def test_a_silent_gateway_loses_its_placements_and_its_place_in_the_queue() -> None:
    cluster = ready_cluster(report_timeout_s=100)
    await cluster.place(request("placed", 256))
    queued = cluster.admit(request("queued", 256))[0]
    other = cluster.admit(request("other", 32, gateway_id="h"))[0]
    await settle()
    cluster.clock.advance(4.0)
    cluster.router.heartbeat(Heartbeat("h", ()))
    cluster.router.sweep()
    assert "placed" in cluster.router.live
    cluster.clock.advance(2.0)
    cluster.router.sweep()
    await settle()
    assert isinstance(queued.exception(), StaleEpoch)
    assert names([other]) == ["other"]
    assert [entry.request_id for entry in cluster.router.live] == ["other"]


async def test_a_lost_finish_is_made_good_by_the_heartbeat() -> None:
    cluster = ready_cluster()
    for name in ("a", "b"):
        await cluster.place(request(name))
    await cluster.place(request("c", gateway_id="h"))
    assert cluster.router.heartbeat(Heartbeat("g", ("b",))).unknown_ids == ()
    assert len(cluster.router.live) == 3  # the heartbeat may be older than the placement
    cluster.clock.advance(6.0)
    cluster.router.heartbeat(Heartbeat("g", ("b",)))
    assert sorted(entry.request_id for entry in cluster.router.live) == ["b", "c"]


async def test_a_late_heartbeat_does_not_bring_back_what_has_finished() -> None:
    cluster = ready_cluster()
    placement = await cluster.place(request("r"))
    cluster.router.finish("r")
    entry = LiveRequest(request("r"), placement, Phase.PREFILL)
    assert cluster.router.heartbeat(Heartbeat("g", ("r",), (entry,))).unknown_ids == ()
    assert_empty(cluster)


async def test_a_gateway_that_was_only_cut_off_gets_its_placements_back() -> None:
    cluster = ready_cluster(report_timeout_s=100)
    cluster.router.finish("r")  # a former run of the same id
    placement = await cluster.place(request("r"))
    cluster.clock.advance(16.0)
    cluster.router.sweep()
    assert_empty(cluster)
    entry = LiveRequest(request("r"), placement, Phase.DECODE)
    assert cluster.router.heartbeat(Heartbeat("g", ("r",))).unknown_ids == ("r",)
    assert cluster.router.heartbeat(Heartbeat("g", ("r",), (entry,))).unknown_ids == ()
    assert cluster.router.live.num_by_phase() == {"prefill": 0, "decode": 1}


# ---- restart of the router


async def test_a_new_router_learns_placements_from_heartbeats() -> None:
    cluster = ready_cluster()
    live = [LiveRequest(request(name), await cluster.place(request(name)), Phase.DECODE) for name in ("a", "b")]
    cluster.router = cluster.new_router(epoch=2)
    ids = ("a", "b")
    assert cluster.router.heartbeat(Heartbeat("g", ids)).unknown_ids == ids
    assert cluster.router.heartbeat(Heartbeat("g", ids, tuple(live))).unknown_ids == ids  # their workers have not reported
    cluster.report(prefill_load(), load("d", num_seqs_running=2, live_requests=("a/1", "b/1")))
    reply = cluster.router.heartbeat(Heartbeat("g", ids, tuple(live)))
    assert (reply.router_epoch, reply.unknown_ids) == (2, ())
    assert cluster.router.live.num_by_phase() == {"prefill": 0, "decode": 2}
    cluster.report(load("d", incarnation="d#2"))
    assert_empty(cluster)
    cluster.router.heartbeat(Heartbeat("g", ids, tuple(live)))
    assert_empty(cluster)


async def test_the_epoch_grows_even_when_the_wall_clock_stepped_back() -> None:
    cluster = ready_cluster()
    placement = replace(await cluster.place(request("r")), router_epoch=50)
    cluster.router.heartbeat(Heartbeat("g", ("r",), (LiveRequest(request("r"), placement, Phase.PREFILL),)))
    assert cluster.router.report(load("d")).router_epoch == 51


def test_epochs_grow_by_themselves() -> None:
    first = Cluster()
    lives = [Router(first.config, first.expected, metrics=RouterMetrics(CollectorRegistry())).epoch for _ in range(3)]
    assert lives == sorted(lives)
    assert lives[0] > 1_700_000_000_000


# ---- what is shown


async def test_blocks_of_a_silent_worker_are_shown_and_not_added_up() -> None:
    cluster = ready_cluster()
    cluster.report(prefill_load(num_blocks_free=90, num_blocks_leased=10))
    assert cluster.router.snapshot()["pools"]["prefill"]["kv_blocks"]["leased"] == 10
    cluster.clock.advance(3.5)
    pool = cluster.router.snapshot()["pools"]["prefill"]
    assert pool["kv_blocks"] == dict.fromkeys(("free", "cached", "owned", "leased", "total"), 0)
    assert [(worker["state"], worker["kv_blocks"]["leased"]) for worker in pool["workers"]] == [("silent", 10)]


async def test_snapshot_and_gauges() -> None:
    cluster = ready_cluster()
    cluster.report(
        prefill_load(num_blocks_free=90, num_blocks_leased=10, num_tokens_waiting=0),
        load("d", num_blocks_free=70, num_blocks_cached=10, num_blocks_owned=20, num_seqs_running=8),
        load("e", state=WorkerState.DRAINING),
    )
    waiting = cluster.admit(request("low", 40, priority=1))[0]
    await settle()
    cluster.clock.advance(2.0)
    books = json.loads(json.dumps(cluster.router.snapshot()))
    assert (books["epoch"], books["state"], books["ready"], books["max_model_len"]) == (1, "running", True, 1024)
    decode = books["pools"]["decode"]
    assert decode["kv_blocks"] == {"free": 170, "cached": 10, "owned": 20, "leased": 0, "total": 200}
    row = decode["workers"][0]
    assert (row["worker_id"], row["incarnation"], row["endpoint"], row["state"], row["age_s"]) == ("d", "d#1", "d:1", "running", 2.0)
    assert row["kv_blocks"] == {"free": 70, "cached": 10, "owned": 20, "leased": 0, "total": 100}
    assert [worker["state"] for worker in decode["workers"]] == ["running", "draining"]
    assert books["queue"]["by_class"]["low"] == {"num_requests": 1, "num_tokens": 40, "oldest_wait_s": 2.0}
    assert books["queue"]["num_requests"] == 1
    assert books["live_placements"] == {"prefill": 0, "decode": 0}
    cluster.router.update_gauges()
    assert cluster.sample("baton_router_queued_tokens", **{"class": "low"}) == 40
    assert cluster.sample("baton_router_workers", role="decode", state="draining") == 1
    cluster.clock.advance(2.0)
    cluster.router.update_gauges()
    assert cluster.sample("baton_router_workers", role="prefill", state="silent") == 1
    assert cluster.sample("baton_router_workers", role="prefill", state="running") == 0
    waiting.cancel()
    await settle()
