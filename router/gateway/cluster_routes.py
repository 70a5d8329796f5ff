"""Routes for those who run the cluster."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from cluster.errors import BatonError, NoCapacity
from router.control.messages import Ready
from router.gateway.error_body import error_response
from router.gateway.gateway import Gateway

_ROUTER_TIMEOUT_S: Final = 5.0


def cluster_router(gateway: Gateway) -> APIRouter:
    """`/health`, `/ready`, `/metrics`, `/v1/cluster`."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The gateway's process is alive; says nothing of the workers."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Whether a request sent now can be served; 503 with the reason if not."""
        answer = await _ready(gateway)
        if answer.ready:
            return JSONResponse({"status": "ready"})
        return error_response(NoCapacity(answer.reason, retry_after_s=1.0))

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Every process of the cluster in one scrape."""
        return PlainTextResponse(await gateway.metrics_text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/cluster")
    async def cluster() -> dict[str, Any]:
        """Pools, workers, queue and blocks, as the router sees them."""
        try:
            async with asyncio.timeout(_ROUTER_TIMEOUT_S):
                return {"model": gateway.describe_model(), **await gateway.router.snapshot()}
        except TimeoutError as error:
            raise NoCapacity("the router does not answer: timeout", retry_after_s=1.0) from error

    return router


async def _ready(gateway: Gateway) -> Ready:
    try:
        async with asyncio.timeout(_ROUTER_TIMEOUT_S):
            return await gateway.router.ready()
    except (BatonError, TimeoutError) as error:
        return Ready(False, f"the router does not answer: {str(error) or 'timeout'}")
