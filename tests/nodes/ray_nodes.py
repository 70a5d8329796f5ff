"""A Ray of three nodes, and Baton on it as `serve run` deploys it: gateway and router on the head, each pool on a node of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Self

import httpx2
import yaml

from tests.integration.served import CAPACITY_WAIT_S, Served
from tests.nodes.network import Network
from tests.nodes.node import Node

POOLS: Final = ("prefill", "decode")
_HEAD, _FIRST_POOL = 2, 3  # numbers of addresses
_BIN: Final = Path(sys.executable).parent
_RAY_PORT, _HTTP_PORT, _GRPC_PORT = 6379, 8000, 9000
_START_S: Final = 120.0
# Ray finds a node dead that answers nothing for 3 s; by its defaults, half a minute.
_HEALTH: Final = {"initial_delay_ms": "1000", "period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}
_ENVIRONMENT: Final = {f"RAY_health_check_{key}": value for key, value in _HEALTH.items()}


class RayNodes:
    """Use it as a context."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-nodes-")))
            self._network = self._stack.enter_context(Network())
            self.head = Node(self._network, _HEAD)
            self._stack.callback(self.head.kill)
            self._start_ray(self.head, "--head", f"--port={_RAY_PORT}", "--num-cpus=4", "--include-dashboard=false")
            self.nodes: dict[str, Node] = {}
            self._stack.callback(self._kill_nodes)
            for pool in POOLS:
                self.add(pool)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lose(self, pool: str) -> None:
        """As by a power cut of its node: nobody hears of it."""
        self.nodes[pool].unplug()
        self.nodes[pool].kill()

    def add(self, pool: str) -> None:
        """A node for a pool, in the place of one that was lost."""
        node = self.nodes[pool] = Node(self._network, _FIRST_POOL + POOLS.index(pool))
        # Without CPUs, so that the gateway and the router stay on the head.
        resources = json.dumps({_resource(pool): 1})
        self._start_ray(node, f"--address={self.head.address}:{_RAY_PORT}", "--num-cpus=0", f"--resources={resources}")

    def _kill_nodes(self) -> None:
        for node in self.nodes.values():
            node.kill()

    @contextmanager
    def serving(self, **args: Any) -> Iterator[Served]:
        """Baton with these args."""
        url = f"http://{self.head.address}:{_HTTP_PORT}"
        file, log = self._folder / "baton.yaml", self._folder / "serve.log"
        file.write_text(yaml.safe_dump(_serve_file(args)))
        with log.open("wb") as output:
            address = f"{self.head.address}:{_RAY_PORT}"
            command = self.head.start(str(_BIN / "serve"), "run", "--address", address, str(file), output=output, environment=_ENVIRONMENT)
        try:
            _await_ready(url, command, log)
            yield Served("baton", url, f"{self.head.address}:{_GRPC_PORT}")
        finally:
            command.terminate()
            command.wait()
            self.head.run(str(_BIN / "python"), "-c", _SHUT_DOWN, f"{self.head.address}:{_RAY_PORT}")

    def _start_ray(self, node: Node, *options: str) -> None:
        with (self._folder / f"ray-{node.address}.log").open("ab") as output:
            started = node.start(
                *(str(_BIN / "ray"), "start", f"--node-ip-address={node.address}", "--object-store-memory=100000000"),
                *("--disable-usage-stats", *options),
                output=output,
                environment=_ENVIRONMENT,
            )
            assert started.wait(_START_S) == 0, Path(output.name).read_text()


_SHUT_DOWN: Final = "import sys, ray; from ray import serve; ray.init(sys.argv[1], log_to_driver=False); serve.shutdown()"


def _resource(pool: str) -> str:
    return f"{pool}_node"


def _serve_file(args: dict[str, Any]) -> dict[str, Any]:
    own = {
        "host": "0.0.0.0",
        **{pool: {"num_cpus": 0, "drain_timeout_s": 5, **args.pop(pool, {}), "resources": {_resource(pool): 1}} for pool in POOLS},
        "gateway": {"grpc_port": _GRPC_PORT, "grpc_host": "0.0.0.0"},
        "router": {"capacity_wait_s": CAPACITY_WAIT_S},
    }
    application = {"name": "baton", "route_prefix": "/", "import_path": "deploy.app:build", "args": {**own, **args}}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "0.0.0.0", "port": _HTTP_PORT},
        "applications": [application],
    }


def _await_ready(url: str, command: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            if httpx2.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        assert command.poll() is None and time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.2)
