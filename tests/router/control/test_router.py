"""The router as a whole: what a placement names, deadlines, cancels, replaced requests, and what it shows. No real time passes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import ClientGone, ContextTooLong, DeadlineExceeded, InvalidRequest
from cluster.types import KVPeer, WorkerRole, WorkerState
from tests.router.control.builders import (
    COLOCATED,
    Cluster,
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
    peer = KVPeer("p#1", "grpc", "not shared_memory: another host")
    cluster.report(
        prefill_load(num_blocks_free=90, num_blocks_leased=10, num_tokens_waiting=0),
        load("d", num_blocks_free=70, num_blocks_cached=10, num_blocks_owned=20, num_seqs_running=8, kv_peers=(peer,)),
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
    assert row["kv_peers"] == [{"incarnation": "p#1", "plane": "grpc", "reason": "not shared_memory: another host"}]
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
