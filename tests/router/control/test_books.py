"""The router's books: what it holds, and that parts which do not agree are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.types import OrderKey
from router.control.dispatcher import Dispatcher
from router.control.live_set import LivePlacement
from router.control.messages import Redirect
from router.control.router import Router
from tests.router.control.builders import Cluster, load, prefill_load, request, settle


async def busy_cluster() -> tuple[Cluster, list[asyncio.Task[object]]]:
    """One request placed, one held in a redirect, two queued, as the decode worker is full but for two."""
    cluster = Cluster()
    cluster.report(prefill_load(), load("d", max_num_seqs=2))
    await cluster.place(request("placed"))
    await cluster.place(request("declined"))
    redirect = asyncio.create_task(cluster.router.redirect(Redirect("declined", "d#1", 1.0)))
    tasks: list[asyncio.Task[object]] = [redirect, *cluster.admit(request("q1"), request("q2"))]
    await settle()
    return cluster, tasks


async def end(tasks: list[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_is_placed_queued_and_redirected_is_held() -> None:
    cluster, tasks = await busy_cluster()
    books = cluster.router.books()
    assert (books.kind, books.name, books.faults) == ("router", "1", ())
    assert books.held == {"placements": 2, "queued": 2, "redirects": 1}
    assert books.requests == ("declined", "placed", "q1", "q2")
    await end(tasks)
    for name in books.requests:
        cluster.router.finish(name)
    books = cluster.router.books()
    assert (books.requests, books.faults) == ((), ())
    assert not any(books.held.values())


def _queue_tokens(router: Router) -> None:
    router.queue._num_tokens += 5


def _queue_heap(router: Router) -> None:
    router.queue._heap.clear()


def _queue_order(router: Router) -> None:
    router.queue._heap.reverse()


def _queue_key(router: Router) -> None:
    _, request_id, number, item = router.queue._heap[0]
    router.queue._heap[0] = (OrderKey(-1.0, 0), request_id, number, item)


def _redirect(router: Router) -> None:
    router.live.end("declined")


def _live_index(router: Router) -> None:
    router.live._on["d#1"].pop("placed")


def _placed_and_queued(router: Router) -> None:
    placed = router.live.get("placed")
    assert placed is not None
    router.live.enter(LivePlacement(replace(placed.request, request_id="q1"), placed.placement, placed.phase, placed.entered_at_s))


def _retired(router: Router) -> None:
    router.workers.report(load("d", incarnation="d#2"), 1000.0)  # past the router, which would end the placements


FAULTS: dict[str, tuple[Callable[[Router], None], str]] = {
    "tokens": (_queue_tokens, "the queue counts 69 tokens, its items have 64"),
    "lost from the heap": (_queue_heap, "2 items are queued, the heap has 0 of them"),
    "heap order": (_queue_order, "the queue is out of order"),
    "another key": (_queue_key, "an item is queued under another order key"),
    "redirect": (_redirect, "declined is redirected and not placed"),
    "index": (_live_index, "the index by worker differs"),
    "two places": (_placed_and_queued, "q1 is placed and queued"),
    "dead worker": (_retired, "is placed on d#1, which is no more"),
}


@pytest.mark.parametrize(("damage", "text"), FAULTS.values(), ids=FAULTS.keys())
async def test_parts_that_do_not_agree_are_named(damage: Callable[[Router], None], text: str) -> None:
    cluster, tasks = await busy_cluster()
    damage(cluster.router)
    faults = cluster.router.faults()
    assert any(text in fault for fault in faults), faults
    await end(tasks)


async def test_credits_that_are_not_what_the_live_set_leaves_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, tasks = await busy_cluster()
    book = cluster.router._dispatcher._book
    entry = book._entries["d#1"]
    book._entries["d#1"] = replace(entry, view=replace(entry.view, num_seqs=entry.view.num_seqs - 1))
    monkeypatch.setattr(Dispatcher, "pump", lambda *_: None)
    [fault] = cluster.router.faults()
    assert fault.startswith("placement sees WorkerView(")
    await end(tasks)
