"""One client's call in the metrics, whatever the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import BatonError, ClientGone, InternalError
from router.gateway.metrics import GatewayMetrics


class CallRecord:
    """Live from the call's arrival; counted exactly once, by how it ended first."""

    def __init__(self, metrics: GatewayMetrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        metrics.live_calls.add(self)

    def end(self, outcome: str) -> None:
        """`outcome` is a finish reason or the code of an error. Only the first call counts."""
        if self in self._metrics.live_calls:
            self._metrics.live_calls.remove(self)
            self._metrics.requests.labels(self._endpoint, outcome).inc()

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """What its body raises ends the call, and passes."""
        try:
            yield
        except BatonError as error:
            self.end(error.code)
            raise
        except asyncio.CancelledError:
            self.end(ClientGone.code)
            raise
        except Exception:
            self.end(InternalError.code)
            raise
