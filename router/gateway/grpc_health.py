"""`grpc.health.v1`: SERVING while the cluster can serve a request, as `/ready` says it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from router.gateway.gateway import Gateway

WATCH_INTERVAL_S: Final = 1.0

_Status = pb.HealthCheckResponse
Context = aio.ServicerContext[Any, Any]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Asks the router anew for each answer, so none is ever old; only a watched service costs a question a second."""

    def __init__(self, gateway: Gateway, services: frozenset[str]) -> None:
        """`services` are the names that share the gateway's state, besides the empty one."""
        self._gateway = gateway
        self._services = services | {""}
        self._closing = asyncio.Event()

    def close(self) -> None:
        """From now on nothing is served; watchers hear it as the last of their streams."""
        self._closing.set()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _Status(status=await self._status())

    async def List(self, _request: Any, _context: Context) -> Any:  # noqa: N802
        status = _Status(status=await self._status())
        return pb.HealthListResponse(statuses=dict.fromkeys(self._services, status))

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802
        last = None
        while True:
            is_last = self._closing.is_set()
            status = await self._status() if request.service in self._services else _Status.SERVICE_UNKNOWN
            if status != last:
                await context.write(_Status(status=status))
                last = status
            if is_last:
                return
            await self._pause()

    async def _status(self) -> Any:
        if self._closing.is_set() or not (await self._gateway.ready()).ready:
            return _Status.NOT_SERVING
        return _Status.SERVING

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(WATCH_INTERVAL_S):
                await self._closing.wait()
        except TimeoutError:
            return
