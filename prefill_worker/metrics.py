"""What a prefill worker counts beside its engine's load."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from prefill_worker.outbox import LeaseEnd


class LeaseMetrics:
    """How leases ended. Many that expire mean that decode workers are slow or gone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ends = Counter("baton_leases", "leases and offers of KV by how they ended", ["end"], registry=registry)
        for end in LeaseEnd:
            self._ends.labels(end.value)

    def count(self, end: LeaseEnd) -> None:
        self._ends.labels(end.value).inc()
