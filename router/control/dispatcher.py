"""Moves requests from the queue's head to workers, whenever a credit may have come free.

The order is kept: while the head waits for credit, nothing goes past it. Only a request that no running worker may serve at all
(each has failed it before) steps aside, so that it does not hold up the others, until a new worker comes or one of those reports again
and so is known to have survived the failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from cluster.errors import BatonError, ContextTooLong
from cluster.types import AdmitRequest, Placement, WorkerRole
from router.control.drain_rate import DrainRate
from router.control.live_set import LivePlacement, LiveSet
from router.control.load_book import LoadBook
from router.control.messages import Phase
from router.control.metrics import RouterMetrics
from router.control.pairing import Limits, limits_of, unserved_reason
from router.control.placement import Choice, PlacementPolicy
from router.control.queue import PriorityQueue, QueueItem
from router.control.redirects import Redirects, address_of
from router.control.workers import WorkerRegistry


@dataclass(slots=True, eq=False)
class Ticket:
    """The queue's payload: the held admit."""

    request: AdmitRequest
    deadline_s: float | None  # on the router's clock
    future: asyncio.Future[Placement]
    no_worker_since_s: float | None = None  # all running workers have failed it


class _Verdict(Enum):
    DONE = auto()  # placed or refused: it left the queue
    WAIT = auto()
    ASIDE = auto()


class Dispatcher:
    """The pump between the queue and the workers."""

    def __init__(
        self,
        *,
        roles: Iterable[WorkerRole],
        registry: WorkerRegistry,
        live: LiveSet,
        queue: PriorityQueue[Ticket],
        redirects: Redirects,
        policy: PlacementPolicy,
        drain: DrainRate,
        metrics: RouterMetrics,
    ) -> None:
        self._book = LoadBook(roles, registry, live)
        self._registry = registry
        self._live = live
        self._queue = queue
        self._redirects = redirects
        self._policy = policy
        self._drain = drain
        self._metrics = metrics

    def pump(self, router_epoch: int, now_s: float) -> None:
        """Places all that can be placed now."""
        if not self._queue and not self._redirects:
            return
        self._book.update(now_s)
        self._metrics.redirects.inc(self._redirects.answer(self._book, router_epoch, now_s))
        loads = self._book.loads()
        if unserved_reason(loads) is not None:
            return
        limits = limits_of(loads)
        aside: list[QueueItem[Ticket]] = []
        while (item := self._queue.head()) is not None:
            verdict = self._serve(item, limits, router_epoch, now_s)
            if verdict is _Verdict.WAIT:
                break
            if verdict is _Verdict.ASIDE:
                self._queue.remove(item.request_id)
                aside.append(item)
        for item in aside:
            self._queue.push(item)

    def refuse(self, item: QueueItem[Ticket], error: BatonError, reason: str) -> None:
        """Ends a queued request with an error."""
        self._queue.remove(item.request_id)
        self._metrics.rejections.labels(reason).inc()
        if not item.payload.future.done():
            item.payload.future.set_exception(error)

    def refuse_where(self, error_of: Callable[[QueueItem[Ticket]], tuple[BatonError, str] | None]) -> None:
        """Ends all queued requests that `error_of` has an error and a reason for."""
        for item in self._queue:
            found = error_of(item)
            if found is not None:
                self.refuse(item, *found)

    def check_integrity(self) -> None:
        """See `LoadBook.check_integrity`."""
        self._book.check_integrity()

    def _serve(self, item: QueueItem[Ticket], limits: Limits, router_epoch: int, now_s: float) -> _Verdict:
        ticket = item.payload
        if ticket.future.done():  # cancelled, and its task has not run since
            self._queue.remove(item.request_id)
            return _Verdict.DONE
        try:
            limits.check(ticket.request)
        except ContextTooLong as error:
            self.refuse(item, error, "context")
            return _Verdict.DONE
        pools = self._book.pools()
        request = ticket.request
        if request.exclude and not self._policy.is_eligible(pools, request):
            request = self._forgiven(item)
        choice = self._policy.choose(pools, request)
        if choice is not None:
            self._place(item, choice, router_epoch, now_s)
            return _Verdict.DONE
        if self._policy.is_eligible(pools, request):
            ticket.no_worker_since_s = None
            return _Verdict.WAIT
        if ticket.no_worker_since_s is None:
            ticket.no_worker_since_s = now_s
        return _Verdict.ASIDE

    def _forgiven(self, item: QueueItem[Ticket]) -> AdmitRequest:
        """The request without the exclusions of workers that have reported since: they live, whatever went wrong before."""
        heard_at_s = {name: worker.heard_at_s for name in item.payload.request.exclude if (worker := self._registry.get(name))}
        left = tuple(name for name in item.payload.request.exclude if heard_at_s.get(name, 0.0) <= item.queued_at_s)
        return replace(item.payload.request, exclude=left)

    def _place(self, item: QueueItem[Ticket], choice: Choice, router_epoch: int, now_s: float) -> None:
        placement = Placement(
            request_id=item.request_id,
            router_epoch=router_epoch,
            order_key=item.order_key,
            decode=address_of(choice.decode),
            prefill=None if choice.prefill is None else address_of(choice.prefill),
            queue_time_s=now_s - item.queued_at_s,
        )
        live = LivePlacement(item.payload.request, placement, Phase.PREFILL, now_s)
        self._queue.remove(item.request_id)
        self._live.enter(live)
        self._drain.placed(item.queued_at_s, now_s)
        self._metrics.placements.inc()
        self._metrics.queue_wait_s.labels(item.class_name).observe(placement.queue_time_s)
        item.payload.future.set_result(placement)
