"""The Serve deployment `Decode`: one decode worker in each replica; in colocated mode it prefills as well.

Serve owns the process: it starts it, asks for its health, and awaits `__del__` when the replica is to go, which is the drain. No request
comes over a Serve handle; the worker's own endpoint is named in its load reports to the Router.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import BatonConfig
from cluster.metrics import REGISTRY, metrics_text
from cluster.types import WorkerRole
from cluster.worker.endpoint import published_host
from cluster.worker.identity import WorkerIdentity
from cluster.worker.reporter import Send
from cluster.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker


class DecodeReplica:
    """A `DecodeWorker` on the replica's event loop."""

    _worker: DecodeWorker | None = None  # until the constructor is done: Serve calls `__del__` even if it fails

    async def __init__(self, config: BatonConfig, model_folder: str, router: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        """Serve awaits it; the replica is ready when it returns."""
        from decode_worker.start import start_worker  # with torch, which the process that composes the application does without

        self._worker = await start_worker(config, Path(model_folder), _settings(config, _sender(router)))

    async def check_health(self) -> None:
        """Raises when the engine makes no progress."""
        if self._worker is not None:
            self._worker.check_health()

    async def metrics_text(self) -> str:
        """This process's metrics in the Prometheus text format."""
        return metrics_text()

    async def __del__(self) -> None:
        if self._worker is not None:
            await self._worker.drain()
            await self._worker.close()


def _settings(config: BatonConfig, send: Send) -> WorkerSettings:
    assert config.cluster_secret is not None, "the composition root draws one"
    role = WorkerRole.COLOCATED if config.mode == "colocated" else WorkerRole.DECODE
    identity = WorkerIdentity.draw(serve.get_replica_context().replica_tag, role, ray.get_runtime_context().get_node_id())
    return WorkerSettings(
        identity=identity,
        pool=config.decode,
        transfer=config.kv_transfer,
        secret=config.cluster_secret,
        send=send,
        host=config.host,
        published_host=published_host(config.host, ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        registry=REGISTRY,
    )


def _sender(router: DeploymentHandle[Any]) -> Send:
    """Load reports over a Serve handle; bytes both ways, without the object store."""
    direct = router.options(_by_reference=False)

    async def send(payload: bytes) -> bytes:
        response = direct.report.remote(payload)
        try:
            reply: bytes = await response
        except asyncio.CancelledError:  # given up: it must not arrive after later ones
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        return reply

    return send


DecodeDeployment = serve.deployment(
    name="Decode",
    max_ongoing_requests=100,  # health aside, only metrics are asked over handles
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=0.1,
)(DecodeReplica)
