"""Routes for those who run the cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from cluster.errors import NoCapacity
from router.gateway.error_body import error_response
from router.gateway.gateway import Gateway


def cluster_router(gateway: Gateway) -> APIRouter:
    """`/health`, `/ready`, `/metrics`, `/v1/cluster`, `/v1/cluster/books`."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The gateway's process is alive; says nothing of the workers."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Whether a request sent now can be served; 503 with the reason if not."""
        answer = await gateway.ready()
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
        return await gateway.describe_cluster()

    @router.get("/v1/cluster/books")
    async def books() -> dict[str, Any]:
        """What every process holds and what is wrong with it, for `baton doctor`."""
        return asdict(await gateway.cluster_books())

    return router
