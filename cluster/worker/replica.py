"""What Serve asks of a worker's replica, whichever kind: health, metrics, its books, and its end, which is the drain.

No request comes over a Serve handle; the worker's own endpoint is named in its load reports to the Router. Nothing here imports ray, which
only the deployments do, or torch, which the process that composes the application does without.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from cluster import wire
from cluster.metrics import metrics_text
from cluster.worker.reporter import Send

if TYPE_CHECKING:
    from cluster.worker.worker import Worker

_LAST_ANSWERS_S: Final = 2.0  # to a commit, or the end of a stream: they go out after what they tell of is done


class WorkerReplica:
    """A worker on the replica's event loop; the constructor of its kind starts it."""

    _worker: Worker | None = None  # until the constructor is done: Serve calls `__del__` even if it fails

    async def check_health(self) -> None:
        """Raises when the engine makes no progress."""
        if self._worker is not None:
            self._worker.check_health()

    async def metrics_text(self) -> str:
        """This process's metrics in the Prometheus text format."""
        return metrics_text()

    async def books(self) -> bytes:
        """This process's `ProcessBooks`, as msgpack."""
        assert self._worker is not None, "Serve calls a replica once its constructor is done"
        return wire.encode(await self._worker.books())

    async def __del__(self) -> None:
        if self._worker is not None:
            await self._worker.drain()
            await self._worker.close(_LAST_ANSWERS_S)


def report_over(router: Any) -> Send:
    """Load reports over `router`, a Serve handle; bytes both ways, without the object store."""
    direct = router.options(_by_reference=False)

    async def send(payload: bytes) -> bytes:
        response = direct.report.remote(payload)
        try:
            reply: bytes = await response
        except asyncio.CancelledError:  # given up: it must not arrive after later ones
            response.cancel()
            raise
        return reply

    return send
