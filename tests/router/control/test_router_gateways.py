"""The router, its gateways and its own restart: orphans, heartbeats, and placements that are learned again. No real time passes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from prometheus_client import CollectorRegistry

from cluster.errors import StaleEpoch
from router.control.messages import Heartbeat, LiveRequest, Phase, Redirect
from router.control.metrics import RouterMetrics
from router.control.router import Router
from tests.router.control.builders import Cluster, answered, assert_empty, load, names, prefill_load, ready_cluster, request, settle

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
