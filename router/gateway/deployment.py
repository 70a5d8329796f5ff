"""The gateway as a Serve deployment: the ingress of the application, stateless, any number of replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import BatonConfig
from cluster.metrics import metrics_text
from cluster.model_config import ModelConfig
from cluster.wire import encode
from router.control.client import RouterClient
from router.control.deployment import caller
from router.gateway.app import create_app
from router.gateway.auditor import Auditor
from router.gateway.gateway import Gateway, GatewayParts
from router.gateway.gather import Source
from router.gateway.grpc_server import GrpcServer, GrpcSettings
from router.gateway.metrics import GatewayMetrics
from router.gateway.model_card import ModelCard
from router.gateway.scrape import Scraper
from router.gateway.tokenizer import Tokenizer
from router.gateway.worker_clients import WorkerClients

_ROUTER_PATIENCE_S: Final = 10.0  # Serve needs a few seconds to replace a router that died
_SCRAPE_TIMEOUT_S: Final = 2.0
_BOOKS_TIMEOUT_S: Final = 4.0  # more than a worker waits for its engine

Handles = Mapping[str, DeploymentHandle[Any]]


class GatewayReplica:
    """One `Gateway`, its application and its gRPC server, on the replica's event loop."""

    def __init__(self, config: BatonConfig, model_folder: str, router: DeploymentHandle[Any], workers: Handles) -> None:
        folder = Path(model_folder)
        metrics = GatewayMetrics()
        assert config.cluster_secret is not None, "the composition root draws one"
        card = ModelCard.of(config, ModelConfig.load(folder), name=config.served_model_name or folder.name, created=int(time.time()))
        handles = _all_handles({"Router": router, **workers})
        self._gateway = Gateway(
            GatewayParts(
                card=card,
                tokenizer=Tokenizer.load(folder),
                router=RouterClient(caller(router), patience_s=_ROUTER_PATIENCE_S),
                workers=WorkerClients(config.cluster_secret),
                config=config.gateway,
                overlaps=config.kv_transfer.overlap,
                metrics=metrics,
                metrics_text=Scraper(_sources(handles, "metrics_text", _SCRAPE_TIMEOUT_S), metrics).text,
                cluster_books=Auditor(_sources(handles, "books", _BOOKS_TIMEOUT_S)).books,
            )
        )
        grpc_settings = GrpcSettings.of(config)
        self._grpc_server = None if grpc_settings is None else GrpcServer(self._gateway, grpc_settings)

    def __serve_build_asgi_app__(self) -> FastAPI:  # the name is Serve's; it calls this after the constructor
        return create_app(self._gateway, self._grpc_server)

    async def metrics_text(self) -> str:
        """This process's metrics in the Prometheus text format."""
        return metrics_text()

    async def books(self) -> bytes:
        """This process's `ProcessBooks`, as msgpack."""
        return encode(self._gateway.books())

    async def check_health(self) -> None:
        """Raises when the router would take this gateway for dead."""
        self._gateway.check_health()


def _all_handles(others: Handles) -> Handles:
    """Those of `others`, and the one of the gateway's own deployment."""
    context = serve.get_replica_context()
    return {context.deployment: serve.get_deployment_handle(context.deployment, app_name=context.app_name), **others}


def _sources(handles: Handles, method: str, timeout_s: float) -> dict[str, Source[Any]]:
    return {name: _source(handle, method, timeout_s) for name, handle in handles.items()}


def _source(handle: DeploymentHandle[Any], method: str, timeout_s: float) -> Source[Any]:
    async def answers() -> Sequence[Any]:
        response = handle.broadcast(method)
        found: list[Any] = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        return found

    return answers


GatewayDeployment = serve.deployment(
    name="Gateway",
    max_ongoing_requests=100_000,  # the router's queue is the only bound
    health_check_period_s=1,  # Serve notices by these checks alone that a replica died
    health_check_timeout_s=30,
)(serve.ingress()(GatewayReplica))
