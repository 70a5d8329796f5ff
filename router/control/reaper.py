"""Ends requests and placements, each for one of the reasons in `live_set`, and takes the gateways' word for what is live."""

from __future__ import annotations

from typing import Final

from cluster.errors import BatonError, ClientGone, StaleEpoch
from cluster.types import AdmitRequest
from router.control.dispatcher import Dispatcher, Ticket
from router.control.gateways import GatewayWatch
from router.control.live_set import LivePlacement, LiveSet
from router.control.messages import Heartbeat, LiveRequest
from router.control.metrics import RouterMetrics
from router.control.orphans import OrphanWatch
from router.control.queue import PriorityQueue, QueueItem
from router.control.redirects import Redirects
from router.control.workers import WorkerRegistry

SETTLE_S: Final = 5.0  # a heartbeat older than this cannot still be on its way


class Reaper:
    """The one way out of the books."""

    def __init__(
        self,
        *,
        live: LiveSet,
        queue: PriorityQueue[Ticket],
        registry: WorkerRegistry,
        redirects: Redirects,
        dispatcher: Dispatcher,
        gateways: GatewayWatch,
        metrics: RouterMetrics,
    ) -> None:
        self._live = live
        self._queue = queue
        self._registry = registry
        self._redirects = redirects
        self._dispatcher = dispatcher
        self._gateways = gateways
        self._metrics = metrics
        self._orphans = OrphanWatch(live, registry, gateways)

    def finish(self, request_id: str) -> None:
        """The gateway's word. Idempotent."""
        self._drop(request_id, ClientGone("the request has ended"), "finished")
        self._live.finish(request_id)

    def replace(self, request: AdmitRequest) -> None:
        """The request is about to be admitted (again)."""
        self._drop(request.request_id, ClientGone("the request was submitted again"), "replaced")

    def withdraw(self, item: QueueItem[Ticket]) -> None:
        """The caller of a held admit went away, maybe in the moment that it was answered."""
        future = item.payload.future
        if self._queue.get(item.request_id) is item:
            self._queue.remove(item.request_id)
            self._metrics.rejections.labels("cancelled").inc()
        elif future.done() and not future.cancelled() and future.exception() is None:
            live = self._live.get(item.request_id)
            if live is not None and live.placement is future.result():
                self._end(live, "cancelled")

    def end_worker(self, incarnation: str) -> None:
        """A life of a worker is over, and with it all that needs it."""
        for live in self._live.on(incarnation):
            self._end(live, "worker_lost")

    def end_silent(self, now_s: float) -> None:
        """Ends what silent workers and gateways hold."""
        for incarnation in self._registry.forget_silent(now_s):
            self.end_worker(incarnation)
        silent = self._gateways.take_silent(now_s)
        for live in self._live if silent else ():
            if live.request.gateway_id in silent:
                self._end(live, "gateway_lost")
        if silent:
            gone = StaleEpoch("the gateway was not heard of: one that lives submits its requests again"), "gateway_lost"
            self._dispatcher.refuse_where(lambda item: gone if item.payload.request.gateway_id in silent else None)

    def end_orphans(self, now_s: float) -> None:
        """Ends what no worker holds and no gateway vouches for. A gateway that was only slow brings it back with its next heartbeat."""
        for live in self._orphans.found(now_s):
            self._end(live, "orphaned")

    def end_unlisted(self, beat: Heartbeat, now_s: float) -> None:
        """Ends what the gateway no longer holds: its `finish` was lost."""
        listed = frozenset(beat.live_ids)
        for live in self._live:
            is_settled = now_s - live.entered_at_s > SETTLE_S
            if live.request.gateway_id == beat.gateway_id and live.request_id not in listed and is_settled:
                self._end(live, "unlisted")

    def reenter(self, entry: LiveRequest, now_s: float) -> None:
        """Takes up a placement of a former life of the router, once the workers that it needs have reported."""
        live = LivePlacement(entry.request, entry.placement, entry.phase, now_s)
        if entry.request.request_id in self._queue or any(self._registry.get(name) is None for name in live.incarnations):
            return
        self._live.reenter(live)

    def _drop(self, request_id: str, error: BatonError, reason: str) -> None:
        item = self._queue.get(request_id)
        if item is not None:
            self._dispatcher.refuse(item, error, reason)
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, reason)

    def _end(self, live: LivePlacement, reason: str) -> None:
        self._live.end(live.request_id)
        self._redirects.fail(live.request_id, StaleEpoch("the placement has ended"))
        self._metrics.ended.labels(reason).inc()
