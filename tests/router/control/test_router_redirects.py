"""The router moves a request to another decode worker, or back to the same one. No real time passes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import NoCapacity, StaleEpoch
from router.control.messages import Redirect
from tests.router.control.builders import answered, load, prefill_load, ready_cluster, request, settle


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
