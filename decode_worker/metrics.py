"""What a decode worker counts beside its engine's load: the KV it fetched."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.metrics import STAGE_BUCKETS_S


class TransferMetrics:
    """Seconds and bytes by data plane, and the intakes that failed by error code."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "baton_transfer_seconds", "reading the KV of a prompt and the commit", ["plane"], buckets=STAGE_BUCKETS_S, registry=registry
        )
        self._bytes = Counter("baton_transfer_bytes", "KV bytes read from prefill workers", ["plane"], registry=registry)
        self._failures = Counter("baton_transfer_failures", "intakes that failed, by error code", ["code"], registry=registry)
        self._declined = Counter("baton_transfers_declined", "intakes declined for want of room", registry=registry)

    def taken(self, plane: str, num_bytes: int, transfer_s: float) -> None:
        self._seconds.labels(plane).observe(transfer_s)
        self._bytes.labels(plane).inc(num_bytes)

    def failed(self, code: str) -> None:
        self._failures.labels(code).inc()

    def declined(self) -> None:
        self._declined.inc()
