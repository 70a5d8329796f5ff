"""The HTTP application over one `Gateway`: the OpenAI API, health, metrics and the state of the cluster."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.errors import BatonError, InternalError, InvalidRequest, RequestError
from router.gateway.cluster_routes import cluster_router
from router.gateway.error_body import error_response
from router.gateway.gateway import Gateway
from router.gateway.grpc_server import GrpcServer
from router.gateway.openai_routes import openai_router

_LOG = logging.getLogger(__name__)


def create_app(gateway: Gateway, grpc_server: GrpcServer | None = None) -> FastAPI:
    """The application; its lifespan starts and closes the gateway, and the gRPC server beside it."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        try:
            if grpc_server is not None:
                await grpc_server.start()
            yield
        finally:
            if grpc_server is not None:
                await grpc_server.close()
            await gateway.close()

    # Bodies are parsed by us (strictly, with a limit), so a generated schema would say nothing of them.
    app = FastAPI(title="Baton", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(openai_router(gateway))
    app.include_router(cluster_router(gateway))
    app.add_exception_handler(BatonError, _baton_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _baton_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    body: RequestError = InvalidRequest(f"{request.method} {request.url.path}: {phrase}")
    response = error_response(body, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _unexpected(_request: Request, error: Exception) -> JSONResponse:
    _LOG.error("bug in the gateway", exc_info=error)
    return error_response(InternalError("internal error of the gateway"))
