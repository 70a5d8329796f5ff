"""The control plane: one queue, one order and one set of placements for the whole cluster. It moves no tokens and no KV.

Life of a request here:

    admit        stamped with its order key; queued; held until the pump places it, its deadline passes or its caller goes away
    placed       in the live set, phase prefill: claims on both workers
    prefill_done the decode worker has taken the KV: phase decode
    redirect     (the decode worker declined, or is gone) another decode worker for the same KV
    finish       gone; idempotent, and every other end is in `live_set`

Life of a router: a new epoch, higher than any before; `recovering` until all expected workers have reported (at most `recovery_s`), when
requests are queued and none is placed. Nothing is stored: workers' reports bring the pools back, gateways' heartbeats the placements,
and gateways submit again what was queued, in its old place. All runs on one event
loop; `sweep` must be called every `SWEEP_INTERVAL_S`, for all that ends by time alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from cluster.books import ProcessBooks, faults_of
from cluster.config import RouterConfig
from cluster.errors import NoCapacity, StaleEpoch
from cluster.types import AdmitRequest, Placement, ReportReply, WorkerLoad, WorkerRole
from router.control import snapshot
from router.control.admission import Admission
from router.control.dispatcher import Dispatcher, Ticket
from router.control.drain_rate import DrainRate
from router.control.gateways import GatewayWatch
from router.control.live_set import LiveSet
from router.control.messages import Heartbeat, HeartbeatReply, Ready, Redirect
from router.control.metrics import RouterMetrics
from router.control.order import OrderStamper, anchored_clock
from router.control.placement import LeastLoaded
from router.control.queue import PriorityQueue
from router.control.readiness import Readiness
from router.control.reaper import Reaper
from router.control.redirects import Redirects
from router.control.workers import WorkerRegistry

SWEEP_INTERVAL_S: Final = 0.1


class Router:
    """The router of one model.

    Args:
        config: bounds, classes and timeouts.
        expected: workers that each pool of the cluster should have; its keys are the pools.
        now: the router's clock, seconds.
        epoch: names this life; default: milliseconds of the wall clock.
        metrics: default: those of the process.
    """

    def __init__(
        self,
        config: RouterConfig,
        expected: Mapping[WorkerRole, int],
        *,
        now: Callable[[], float] | None = None,
        epoch: int | None = None,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self.epoch = time.time_ns() // 1_000_000 if epoch is None else epoch
        self.live = LiveSet()
        self.queue: PriorityQueue[Ticket] = PriorityQueue(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        self.workers = WorkerRegistry(config.report_timeout_s)
        self._config = config
        self._roles = tuple(expected)
        self._now = now or anchored_clock()
        self._metrics = metrics or RouterMetrics()
        self._stamper = OrderStamper(config.classes)
        self._gateways = GatewayWatch(config.gateway_timeout_s)
        self._readiness = Readiness(
            self.workers, expected, recovery_s=config.recovery_s, capacity_wait_s=config.capacity_wait_s, now_s=self._now()
        )
        self._wire()

    def _wire(self) -> None:
        drain = DrainRate()
        policy = LeastLoaded(self._config.max_prefill_ahead)
        self._admission = Admission(self._stamper, self.queue, drain, self._metrics)
        self._redirects = Redirects(policy, self.workers, self.live, capacity_wait_s=self._config.capacity_wait_s)
        self._dispatcher = Dispatcher(
            roles=self._roles,
            registry=self.workers,
            live=self.live,
            queue=self.queue,
            redirects=self._redirects,
            policy=policy,
            drain=drain,
            metrics=self._metrics,
        )
        self._reaper = Reaper(
            live=self.live,
            queue=self.queue,
            registry=self.workers,
            redirects=self._redirects,
            dispatcher=self._dispatcher,
            gateways=self._gateways,
            metrics=self._metrics,
        )

    async def admit(self, request: AdmitRequest) -> Placement:
        """Waits in the queue for a placement. Cancelling the call takes the request out of the queue, or ends its placement.

        A request that is queued or placed already is taken anew: its former placement ends. One with an order key keeps it, and goes
        past the queue's bounds.

        Raises:
            InvalidRequest, ContextTooLong: it can never be placed.
            Overloaded: a bound of the queue is reached, or its deadline would pass in the queue; has `retry_after_s`.
            DeadlineExceeded: its deadline has passed, here or in the queue.
            NoCapacity: for `capacity_wait_s` no worker could have taken it.
        """
        now_s = self._now()
        self._gateways.heard(request.gateway_id, now_s)
        self._reaper.replace(request)
        self._admission.check(request, self._readiness.running(now_s))
        reason = self._readiness.no_capacity(now_s)
        if reason is not None:
            raise self._admission.rejected(NoCapacity(reason, retry_after_s=self._config.capacity_wait_s), "no_capacity")
        item = self._admission.enqueue(request, now_s)
        self._pump(now_s)
        try:
            return await item.payload.future
        except asyncio.CancelledError:
            self._reaper.withdraw(item)
            self._pump(self._now())
            raise

    def prefill_done(self, request_id: str) -> None:
        """The prefill worker holds nothing of the request any more. Idempotent; unknown ids are fine."""
        self.live.prefill_done(request_id)
        self._pump(self._now())

    async def redirect(self, redirect: Redirect) -> Placement:
        """Another decode worker for KV that waits at its prefill worker; after `retry_after_s`, maybe the same one again.

        Raises:
            StaleEpoch: the request is not placed, as far as this life of the router knows: admit it again.
            NoCapacity: the KV is gone, or for `capacity_wait_s` no decode worker could have read it.
        """
        if redirect.is_unreachable:
            self.workers.suspect(redirect.declined_incarnation)
        if redirect.request_id not in self.live:
            raise StaleEpoch(f"request {redirect.request_id} is not placed in epoch {self.epoch}")
        now_s = self._now()
        pending = self._redirects.add(redirect, now_s)
        self._pump(now_s)
        try:
            return await pending.future
        finally:
            self._redirects.discard(pending)

    def finish(self, request_id: str) -> None:
        """Ends a request wherever it is. Idempotent; unknown ids are fine."""
        self._reaper.finish(request_id)
        self._pump(self._now())

    def report(self, load: WorkerLoad) -> ReportReply:
        """Takes a worker's report. A new incarnation ends the placements of the one before."""
        now_s = self._now()
        ended = self.workers.report(load, now_s)
        if ended is not None:
            self._reaper.end_worker(ended)
        self._pump(now_s)
        return ReportReply(self.epoch)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Takes a gateway's word for what is live: enters what this life of the router does not know, ends what is not listed."""
        now_s = self._now()
        self._gateways.heard(beat.gateway_id, now_s)
        for entry in beat.entries:
            if entry.placement.router_epoch > self.epoch:  # the wall clock stepped back between two lives
                self.epoch = entry.placement.router_epoch + 1
            self._reaper.reenter(entry, now_s)
        self._reaper.end_unlisted(beat, now_s)
        self._pump(now_s)
        return HeartbeatReply(self.epoch, tuple(name for name in beat.live_ids if self.live.is_unknown(name)))

    def sweep(self) -> None:
        """Ends all that has run out of time."""
        now_s = self._now()
        self._reaper.end_silent(now_s)
        self._reaper.end_orphans(now_s)
        no_capacity = self._readiness.no_capacity(now_s)
        self._dispatcher.refuse_where(lambda item: self._admission.overdue(item, now_s, self._config.capacity_wait_s, no_capacity))
        self._pump(now_s)

    def snapshot(self) -> dict[str, Any]:
        """The books as JSON: the router's share of `GET /v1/cluster`."""
        now_s = self._now()
        ready = self.ready()
        return {
            "epoch": self.epoch,
            "state": "recovering" if self._readiness.is_recovering(now_s) else "running",
            "ready": ready.ready,
            "reason": ready.reason,
            **snapshot.cluster(self.workers, self._roles, now_s),
            "queue": snapshot.queue(self.queue, self._stamper.class_names, now_s),
            "live_placements": self.live.num_by_phase(),
        }

    def ready(self) -> Ready:
        """Whether new requests can be placed; else why not."""
        return self._readiness.ready(self._now())

    def update_gauges(self) -> None:
        """Brings the metrics that mirror the books up to date, for a scrape."""
        now_s = self._now()
        queued = self.queue.by_class(self._stamper.class_names, now_s)
        self._metrics.set_gauges(queued, self.live.num_by_phase(), snapshot.worker_counts(self.workers, now_s))

    def books(self) -> ProcessBooks:
        """What this life of the router holds, and whether its parts agree."""
        return ProcessBooks(
            kind="router",
            name=str(self.epoch),
            held={"placements": len(self.live), "queued": len(self.queue), "redirects": len(self._redirects)},
            faults=self.faults(),
            requests=tuple(sorted({live.request_id for live in self.live} | {item.request_id for item in self.queue})),
        )

    def faults(self) -> tuple[str, ...]:
        """Where its parts do not agree, in words."""
        parts = (self.live, self.queue, self._redirects, self._dispatcher)
        return faults_of(*(part.check_integrity for part in parts), self._check_places)

    def _check_places(self) -> None:
        for live in self.live:
            assert live.request_id not in self.queue, f"{live.request_id} is placed and queued"
            for name in live.incarnations:
                assert not self.workers.is_retired(name), f"{live.request_id} is placed on {name}, which is no more"

    def _pump(self, now_s: float) -> None:
        if not self._readiness.is_recovering(now_s):
            self._dispatcher.pump(self.epoch, now_s)
