"""The router and its workers: recovery, capacity, failed and silent workers, and new lives of lost ones. No real time passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import NoCapacity
from cluster.types import WorkerRole, WorkerState
from router.control.messages import Heartbeat
from tests.router.control.builders import (
    LAYOUT,
    Cluster,
    answered,
    assert_empty,
    key,
    load,
    names,
    prefill_load,
    prefill_of,
    ready_cluster,
    request,
    settle,
)

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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"checkpoint": "x"}, "checkpoint is x and c"),
        ({"layout": replace(LAYOUT, kv_dtype="int8", packing="vnni")}, "kv_dtype: int8 cannot become bf16"),
    ],
)
async def test_mismatched_pools_are_not_ready_and_say_why(changes: dict[str, Any], reason: str) -> None:
    cluster = Cluster()
    cluster.report(prefill_load(**changes), load("d"))
    ready = cluster.router.ready()
    assert not ready.ready
    assert reason in ready.reason
    assert cluster.router.snapshot()["reason"] == ready.reason
    cluster.clock.advance(5.0)
    cluster.report(prefill_load(**changes), load("d"))
    with pytest.raises(NoCapacity, match=reason):
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
