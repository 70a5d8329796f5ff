"""The router's metrics. Gauges are set from the books when they are scraped, so they cannot drift from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.metrics import REGISTRY, STAGE_BUCKETS_S
from router.control.queue import ClassGauge


class RouterMetrics:
    """One router's families in a registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.queue_wait_s: Final = Histogram(
            "baton_router_queue_wait_seconds", "From admission to placement", ["class"], buckets=STAGE_BUCKETS_S, registry=registry
        )
        self.placements: Final = Counter("baton_router_placements", "Requests placed on workers", registry=registry)
        self.redirects: Final = Counter("baton_router_redirects", "Requests moved after a decode worker declined", registry=registry)
        self.rejections: Final = Counter("baton_router_rejections", "Requests refused", ["reason"], registry=registry)
        self.ended: Final = Counter("baton_router_placements_ended", "Placements ended", ["reason"], registry=registry)
        self._queued = Gauge("baton_router_queued_requests", "Requests in the queue", ["class"], registry=registry)
        self._queued_tokens = Gauge("baton_router_queued_tokens", "Prompt tokens in the queue", ["class"], registry=registry)
        self._live = Gauge("baton_router_live_placements", "Placements that have not ended", ["phase"], registry=registry)
        self._workers = Gauge("baton_router_workers", "Workers known to the router", ["role", "state"], registry=registry)

    def set_gauges(self, queue: Mapping[str, ClassGauge], live: Mapping[str, int], workers: Mapping[tuple[str, str], int]) -> None:
        """Queue by class, live placements by phase, workers by (role, state)."""
        for name, gauge in queue.items():
            self._queued.labels(name).set(gauge.num_requests)
            self._queued_tokens.labels(name).set(gauge.num_tokens)
        for phase, count in live.items():
            self._live.labels(phase).set(count)
        self._workers.clear()
        for (role, state), count in workers.items():
            self._workers.labels(role, state).set(count)
