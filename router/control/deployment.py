"""The router as a Serve deployment: one replica, bytes in and out.

`max_ongoing_requests` is far above any queue bound, as held admits must never block the calls that free credits. Serve replaces the
replica when it dies; the next one starts with a new epoch and empty books (see `router`).
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.config import BatonConfig
from cluster.errors import NoCapacity
from cluster.metrics import metrics_text
from cluster.types import WorkerRole
from cluster.wire import encode
from router.control.client import Call
from router.control.router import SWEEP_INTERVAL_S, Router
from router.control.service import RouterService

_log = logging.getLogger(__name__)


def expected_workers(config: BatonConfig) -> dict[WorkerRole, int]:
    """How many workers each pool of the configured cluster has."""
    if config.mode == "colocated":
        return {WorkerRole.COLOCATED: config.decode.replicas}
    return {WorkerRole.PREFILL: config.prefill.replicas, WorkerRole.DECODE: config.decode.replicas}


class RouterReplica:
    """`Router` in a replica's event loop, with its sweep."""

    def __init__(self, config: BatonConfig) -> None:
        self._router = Router(config.router, expected_workers(config))
        self._service = RouterService(self._router)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="router-sweep")

    async def call(self, method: str, payload: bytes) -> bytes:
        """A gateway's call: see `RouterService.call`."""
        return await self._service.call(method, payload)

    async def report(self, payload: bytes) -> bytes:
        """A worker's report: see `RouterService.report`."""
        return self._service.report(payload)

    async def metrics_text(self) -> str:
        """This process's metrics in the Prometheus text format."""
        self._router.update_gauges()
        return metrics_text()

    async def books(self) -> bytes:
        """This process's `ProcessBooks`, as msgpack."""
        return encode(self._router.books())

    async def check_health(self) -> None:
        """Raises when nothing would end by time any more."""
        if self._sweeper.done():
            raise RuntimeError("the router's sweep has stopped")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                self._router.sweep()
            except Exception:  # one bad entry must not stop time for all others
                _log.exception("the router's sweep failed")


RouterDeployment = serve.deployment(
    name="Router",
    num_replicas=1,
    max_ongoing_requests=100_000,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=1,  # what is held is submitted again to the next life
)(RouterReplica)


def caller(handle: DeploymentHandle[Any]) -> Call:
    """The `call` of a `RouterClient` over a Serve handle: says NoCapacity when the router is gone.

    A call that is abandoned goes on until the router answers; for what it holds (`admit`, `redirect`) that is at the request's `finish`. It
    is not cancelled, neither by us nor, in a context of its own, by Serve with the client's request: grpc.aio never frees a call that is
    cancelled while it waits (grpc/grpc#43360).
    """
    direct = handle.options(_by_reference=False)

    async def ask(method: str, payload: bytes) -> bytes:
        try:
            reply: bytes = await direct.call.remote(method, payload)
        except (RayError, RayServeException, asyncio.CancelledError) as error:  # nobody cancels us: it was the call below
            raise NoCapacity(f"the router cannot be reached: {type(error).__name__}", retry_after_s=1.0) from error
        return reply

    async def call(method: str, payload: bytes) -> bytes:
        answer = asyncio.create_task(ask(method, payload), context=Context())
        answer.add_done_callback(_see)
        return await asyncio.shield(answer)

    return call


def _see(answer: asyncio.Task[bytes]) -> None:
    """Its error is of no interest if nobody waits any more."""
    if not answer.cancelled():
        answer.exception()
