"""A Ray cluster in this process's own subtree, with one Serve application on it, as `serve run FILE` would deploy it.

`start_ray` → `start_serve` → `deploy` → `await_running` → … → `stop`, from any point. Every process that was started is gone then.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.api import serve_start
from ray.serve.config import gRPCOptions
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from cluster.errors import ConfigError
from deploy.config_file import ServeFile
from deploy.preflight import pools
from deploy.process_tree import adopt_orphans, end_descendants
from deploy.progress import Progress

_OBJECT_STORE_BYTES: Final = 100 * 2**20  # Baton moves nothing through Ray's store
_SPARE_CPUS: Final = 2
_POLL_S: Final = 0.1
_WATCH_S: Final = 1.0
_END_TIMEOUT_S: Final = 10.0


class StartFailed(Exception):
    """The application did not come up; the message is the cause."""


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """What its body raises, of which Ray has no list, is that `name` could not be started."""
    try:
        yield
    except Exception as error:
        raise StartFailed(f"{name} did not start: {last_line(str(error) or type(error).__name__)}") from error


def check_ports_free(file: ServeFile) -> None:
    """
    Raises:
        ConfigError: names the key of a port on which something else listens, or that two keys give.
    """
    _check_port_free(file.host, file.port, "http_options.port", "--port")
    gateway = file.config.gateway
    if gateway.grpc_port is not None:
        if gateway.grpc_port == file.port and _overlap(file.host, gateway.grpc_host):
            raise ConfigError(
                f"gateway.grpc_port: {file.port} is http_options.port too; choose another for one of them", param="gateway.grpc_port"
            )
        _check_port_free(gateway.grpc_host, gateway.grpc_port, "gateway.grpc_port", "--set gateway.grpc_port=")


def _overlap(host: str, other: str) -> bool:
    return host == other or bool({host, other} & {"0.0.0.0", "::"})


def _check_port_free(host: str, port: int, key: str, option: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{key}: {port} on {host} is in use; choose another with {option}", param=key) from error
            raise ConfigError(f"{key}: cannot listen on {host}:{port}: {error.strerror}", param=key) from error


@dataclass
class LocalCluster:
    """One start of Ray and Serve."""

    file: ServeFile
    progress: Progress
    _client: Any = None
    _shown: dict[str, str] = field(default_factory=dict)  # what was last said of each deployment

    def start_ray(self) -> None:
        """Starts Ray. It sets a signal handler of its own.

        Raises:
            StartFailed: Ray's processes did not come up, as on a machine that is too busy.
        """
        adopt_orphans()
        with _failing("Ray"):
            ray.init(
                address="local",
                num_cpus=self._num_cpus(),
                resources=self._resources(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                namespace="serve",
                _node_ip_address="127.0.0.1",
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)

    def start_serve(self) -> None:
        """Starts Serve's controller and the HTTP proxy.

        Raises:
            StartFailed: they did not come up.
        """
        schema: ServeDeploySchema = self.file.schema
        with _failing("Serve"):
            self._client = serve_start(
                http_options=schema.http_options.model_dump(),
                proxy_location=schema.proxy_location,
                grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
                controller_options=schema.controller_options,
                global_logging_config=schema.logging_config,
            )

    def deploy(self) -> None:
        """Hands the application to Serve's controller, which imports and builds it."""
        self._client.deploy_apps(self.file.schema, _blocking=False)

    def await_running(self) -> None:
        """Returns when every replica is up.

        Raises:
            StartFailed: when one cannot be; the message is its own last word.
        """
        while True:
            application = serve.status().applications.get(self.file.application)
            if application is not None:
                self._show(application)
                if application.status == ApplicationStatus.RUNNING:
                    return
                _raise_failure(application)
            time.sleep(_POLL_S)  # Serve tells its state only when asked

    @property
    def log_folder(self) -> str | None:
        """Where Serve's processes write what they have to say; it stays after the end. None when Ray did not start."""
        node: Any = ray._private.worker._global_node  # typed as None in Ray
        return None if node is None else f"{node.get_session_dir_path()}/logs/serve"

    def watch(self) -> NoReturn:
        """Tells of replicas that die and come back, until interrupted."""
        while True:
            time.sleep(_WATCH_S)
            with suppress(RayError):  # the controller itself is being restarted
                application = serve.status().applications.get(self.file.application)
                if application is not None:
                    self._show(application)

    def stop(self) -> None:
        """Drains the replicas and ends every process; idempotent."""
        if ray.is_initialized():
            if self._client is not None:
                serve.delete(self.file.application)  # drains; Serve's own shutdown would do no more, but complains in the end
            ray.shutdown()
        end_descendants(_END_TIMEOUT_S)

    def kill(self) -> None:
        """Ends every process at once, with no word to clients."""
        end_descendants(0)

    def _num_cpus(self) -> int:
        config = self.file.config
        wanted = config.router.num_cpus + config.gateway.replicas * config.gateway.num_cpus
        wanted += sum(pool.replicas * pool.num_cpus for _, pool in pools(config))
        return max(int(wanted) + 1 + _SPARE_CPUS, os.cpu_count() or 1)  # logical: Ray counts them, the kernel shares them

    def _resources(self) -> dict[str, float]:
        """This machine is all nodes of the config."""
        wanted: defaultdict[str, float] = defaultdict(float)
        for _, pool in pools(self.file.config):
            for name, amount in pool.resources.items():
                wanted[name] += pool.replicas * amount
        return {name: float(math.ceil(amount)) for name, amount in wanted.items()}

    def _show(self, application: Any) -> None:
        for name, deployment in application.deployments.items():
            running = deployment.replica_states.get("RUNNING", 0)
            total = sum(n for state, n in deployment.replica_states.items() if state != "STOPPING")
            state = f"{name}: {running} of {total} replicas running" if total else ""
            if state and self._shown.get(name) != state:
                self._shown[name] = state
                self.progress.step(state)


def _raise_failure(application: Any) -> None:
    for name, deployment in application.deployments.items():
        if "failed to start" in deployment.message:
            raise StartFailed(f"{name}: {last_line(deployment.message)}")
    if application.status == ApplicationStatus.DEPLOY_FAILED:
        raise StartFailed(last_line(application.message))


def last_line(message: str) -> str:
    """What a traceback says in the end: the error itself, without its module."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    error = next((line for line in reversed(lines) if "Error" in line.partition(":")[0]), lines[-1] if lines else "unknown cause")
    name, colon, text = error.partition(": ")
    return f"{name.rpartition('.')[2]}: {text}" if colon else error
