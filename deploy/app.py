"""The composition root: `build(args)` turns the args of a Serve config file into the application.

`serve run`, `serve deploy` and `baton serve` all come here. It binds four deployments; the gateway is the ingress:

    Gateway ──► Router ◄── Prefill, Decode        (Serve handles: admissions, load reports)
       └──────► Prefill, Decode                   (Serve handles: only to gather metrics and books; tokens go over the workers' own gRPC)
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final

from ray import serve

from cluster.config import BatonConfig, PoolConfig, load_config
from decode_worker.deployment import DecodeDeployment
from deploy.calibration import calibrate_cached
from deploy.preflight import check_model
from deploy.pull import resolve_model, served_name
from prefill_worker.deployment import PrefillDeployment
from router.control.deployment import RouterDeployment
from router.gateway.deployment import GatewayDeployment

_DRAIN_MARGIN_S: Final = 5.0
_START_TRIES: Final = 3


def build(args: dict[str, Any]) -> serve.Application:
    """The application that `args` describes.

    Raises:
        ConfigError: names the key at fault.
    """
    config = load_config(args)
    folder = resolve_model(config.model)
    check_model(config, folder)
    calibrate_cached(folder)
    return _bind(_completed(config, folder), str(folder))


def _completed(config: BatonConfig, folder: Path) -> BatonConfig:
    return config.model_copy(
        update={
            "served_model_name": config.served_model_name or served_name(config.model, folder),
            "cluster_secret": config.cluster_secret or secrets.token_hex(16),
        }
    )


def _bind(config: BatonConfig, folder: str) -> serve.Application:
    logging_config = {"log_level": config.log_level, "enable_access_log": False}
    router = RouterDeployment.options(
        ray_actor_options={"num_cpus": config.router.num_cpus}, logging_config=logging_config, max_constructor_retry_count=_START_TRIES
    ).bind(config)
    workers = {"Decode": DecodeDeployment.options(**_pool_options(config.decode, logging_config)).bind(config, folder, router)}
    if config.mode == "disaggregated":
        workers["Prefill"] = PrefillDeployment.options(**_pool_options(config.prefill, logging_config)).bind(config, folder, router)
    return GatewayDeployment.options(
        num_replicas=config.gateway.replicas,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        graceful_shutdown_timeout_s=config.decode.drain_timeout_s + _DRAIN_MARGIN_S,
        logging_config=logging_config,
        max_constructor_retry_count=_START_TRIES,
    ).bind(config, folder, router, workers)


def _pool_options(pool: PoolConfig, logging_config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_replicas": pool.replicas,
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "resources": pool.resources,
            "runtime_env": {"env_vars": _worker_environment(pool)},
        },
        "graceful_shutdown_timeout_s": pool.drain_timeout_s + _DRAIN_MARGIN_S,
        "logging_config": logging_config,
        "max_constructor_retry_count": _START_TRIES,
    }


def _worker_environment(pool: PoolConfig) -> dict[str, str]:
    """What OpenMP and torch read when they are loaded. Threads that wait by spinning would take the cores from other workers."""
    threads = str(pool.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for weights
    }
