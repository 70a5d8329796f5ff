"""The Serve deployment `Prefill`: one prefill worker in each replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import BatonConfig
from cluster.faults.injector import FaultInjector
from cluster.metrics import REGISTRY
from cluster.types import WorkerRole
from cluster.worker.endpoint import published_host
from cluster.worker.identity import WorkerIdentity
from cluster.worker.replica import WorkerReplica, report_over
from cluster.worker.reporter import Send
from cluster.worker.settings import WorkerSettings


class PrefillReplica(WorkerReplica):
    """A `PrefillWorker` on the replica's event loop."""

    async def __init__(self, config: BatonConfig, model_folder: str, router: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        """Serve awaits it; the replica is ready when it returns."""
        from prefill_worker.start import start_worker  # with torch, which the process that composes the application does without

        self._worker = await start_worker(config, Path(model_folder), _settings(config, report_over(router)))


def _settings(config: BatonConfig, send: Send) -> WorkerSettings:
    assert config.cluster_secret is not None, "the composition root draws one"
    replica = serve.get_replica_context()
    identity = WorkerIdentity.draw(replica.replica_tag, WorkerRole.PREFILL, ray.get_runtime_context().get_node_id())
    return WorkerSettings(
        identity=identity,
        pool=config.prefill,
        transfer=config.kv_transfer,
        secret=config.cluster_secret,
        send=send,
        host=config.host,
        published_host=published_host(config.host, ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        registry=REGISTRY,
        faults=FaultInjector(config.fault_injection, role=identity.role, replica=replica.rank.rank, registry=REGISTRY),
    )


PrefillDeployment = serve.deployment(
    name="Prefill",
    max_ongoing_requests=100,  # health aside, only metrics and books are asked over handles
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=0.1,
)(PrefillReplica)
