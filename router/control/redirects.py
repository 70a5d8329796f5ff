"""Requests whose decode worker declined: their KV waits at the prefill worker, so they go before everything in the queue.

Until the time that the declining worker asked for, only another worker with credit will do; from then on any will, the same one too:
its Intake is the authority on its blocks and may decline again. So a redirect is answered within that time, unless no worker at all
could read the KV: then it waits for `capacity_wait_s`, since Serve replaces a worker that died.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from cluster.errors import BatonError, NoCapacity, StaleEpoch
from cluster.types import Placement, WorkerAddress, WorkerLoad
from router.control.live_set import LivePlacement, LiveSet
from router.control.load_book import LoadBook
from router.control.messages import Redirect
from router.control.placement import PlacementPolicy
from router.control.workers import WorkerRegistry

MAX_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class PendingRedirect:
    """One held call."""

    redirect: Redirect
    any_from_s: float
    give_up_s: float
    future: asyncio.Future[Placement]


class Redirects:
    """The held redirects, at most one a request."""

    def __init__(self, policy: PlacementPolicy, registry: WorkerRegistry, live: LiveSet, *, capacity_wait_s: float) -> None:
        self._policy = policy
        self._registry = registry
        self._live = live
        self._capacity_wait_s = capacity_wait_s
        self._pending: dict[str, PendingRedirect] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, redirect: Redirect, now_s: float) -> PendingRedirect:
        """Holds a redirect until `answer` has a worker for it."""
        wait_s = min(max(redirect.retry_after_s, 0.0), MAX_WAIT_S)
        any_from_s, give_up_s = now_s + wait_s, now_s + max(wait_s, self._capacity_wait_s)
        pending = PendingRedirect(redirect, any_from_s, give_up_s, asyncio.get_running_loop().create_future())
        self.fail(redirect.request_id, StaleEpoch("the request was redirected again"))
        self._pending[redirect.request_id] = pending
        return pending

    def discard(self, pending: PendingRedirect) -> None:
        """The call is over. Idempotent."""
        if self._pending.get(pending.redirect.request_id) is pending:
            del self._pending[pending.redirect.request_id]

    def fail(self, request_id: str, error: BatonError) -> None:
        """Ends the held call of a request, if there is one."""
        pending = self._pending.pop(request_id, None)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(error)

    def answer(self, book: LoadBook, router_epoch: int, now_s: float) -> int:
        """Answers those that can be, in order; how many."""
        live = [entry for entry in map(self._live.get, self._pending) if entry is not None]
        live.sort(key=lambda entry: entry.placement.order_key)
        return sum(self._answer(entry, self._pending[entry.request_id], book, router_epoch, now_s) for entry in live)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every held call is of a request that is placed."""
        for request_id, pending in self._pending.items():
            assert pending.redirect.request_id == request_id, f"the redirect of {pending.redirect.request_id} is held as {request_id}"
            assert request_id in self._live, f"{request_id} is redirected and not placed"

    def _answer(self, live: LivePlacement, pending: PendingRedirect, book: LoadBook, router_epoch: int, now_s: float) -> bool:
        if pending.future.done():
            return False
        source = live.placement.prefill
        prefill = None if source is None else self._registry.get(source.incarnation)
        if source is not None and prefill is None:
            self.fail(live.request_id, NoCapacity("the request's KV is gone with its prefill worker", retry_after_s=1.0))
            return False
        target = self._target(live, pending, None if prefill is None else prefill.load, book, now_s)
        if target is None:
            if now_s >= pending.give_up_s:
                self.fail(live.request_id, NoCapacity("no decode worker can take the request's KV", retry_after_s=1.0))
            return False
        placement = self._live.redirect(live.request_id, address_of(target), router_epoch)
        del self._pending[live.request_id]
        pending.future.set_result(placement)
        return True

    def _target(
        self, live: LivePlacement, pending: PendingRedirect, prefill: WorkerLoad | None, book: LoadBook, now_s: float
    ) -> WorkerLoad | None:
        avoid = (pending.redirect.declined_incarnation,)
        other = self._policy.choose_decode(book.pools(), live.request, prefill, avoid, need_credit=True)
        if other is not None or now_s < pending.any_from_s:
            return other
        return self._policy.choose_decode(book.pools(), live.request, prefill, (), need_credit=False)


def address_of(load: WorkerLoad) -> WorkerAddress:
    """Where a reported worker is called."""
    return WorkerAddress(load.worker_id, load.incarnation, load.endpoint)
