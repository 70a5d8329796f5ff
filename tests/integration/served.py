"""One application of the demo model on the session's Serve, as the tests see it: over HTTP and gRPC, as clients do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from cluster.books import ClusterBooks
from cluster.process_state import ProcessState
from cluster.wire import validated
from deploy.diagnosis import diagnose
from tests.conftest import free_port

LOCAL = Path(__file__).parents[2] / "deploy/local.yaml"
CLOSE_S = 10.0
CAPACITY_WAIT_S = 80.0  # for a pool's only worker to come back after a kill, on two cores that are busy with more
SPARE_SOCKETS = 6  # Ray opens a connection of its own now and then; a leak of one a request is a hundred


@dataclass(frozen=True, slots=True)
class Served:
    """A running application."""

    name: str
    url: str
    grpc_target: str

    def client(self, **options: Any) -> AsyncOpenAI:
        """The openai client, without retries of its own."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180, **options)

    async def get(self, path: str) -> httpx2.Response:
        """One GET."""
        async with httpx2.AsyncClient(timeout=30) as client:
            return await client.get(self.url + path)

    async def books(self) -> dict[str, Any]:
        """`/v1/cluster`."""
        answer: dict[str, Any] = (await self.get("/v1/cluster")).json()
        return answer

    async def processes(self) -> ClusterBooks:
        """`/v1/cluster/books`."""
        return validated(ClusterBooks, (await self.get("/v1/cluster/books")).json())

    async def counted(self, name: str, **labels: str) -> float:
        """The sum of a counter's samples with these labels, over all processes; its name as in `/metrics`."""
        families = text_string_to_metric_families((await self.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def await_balance(self) -> None:
        """Returns when every process holds nothing and finds its books right, and all agree; that is bound to come soon."""
        deadline_s = time.monotonic() + CLOSE_S
        while not (found := diagnose(await self.processes())).is_idle:
            assert time.monotonic() < deadline_s, str(found)
            await asyncio.sleep(0.1)

    async def states(self) -> dict[str, ProcessState]:
        """What the kernel counts for each process."""
        return {process.process: process.state for process in (await self.processes()).processes}

    async def await_no_more_files_than(self, before: dict[str, ProcessState]) -> None:
        """Returns when no process that was there `before` has more files open, or more shared memory mapped, than then, but for
        `SPARE_SOCKETS`."""
        deadline_s = time.monotonic() + CLOSE_S
        while more := more_held(before, await self.states()):
            assert time.monotonic() < deadline_s, more
            await asyncio.sleep(0.1)  # gRPC closes sockets in a thread of its own and tells nobody

    async def await_ready(self) -> None:
        """Returns when `/ready` says so."""
        deadline_s = time.monotonic() + 60
        while (answer := await self.get("/ready")).status_code != 200:
            assert time.monotonic() < deadline_s, answer.text
            await asyncio.sleep(0.1)

    def pids(self, deployment: str) -> list[int]:
        """The processes of a deployment's replicas, but for those that have none yet."""
        from ray.serve.context import _get_global_client

        details = _get_global_client().get_serve_details()  # type: ignore[union-attr]
        replicas = details["applications"][self.name]["deployments"][deployment]["replicas"]
        return [replica["pid"] for replica in replicas if replica.get("pid")]


def more_held(before: dict[str, ProcessState], after: dict[str, ProcessState]) -> dict[str, tuple[Any, Any]]:
    """Files and segments before and after, of each process that lives on with more of one kind, but for `SPARE_SOCKETS`."""
    survivors = before.keys() & after.keys()
    assert survivors, "no process has survived"
    held = {name: (_files_and_segments(before[name]), _files_and_segments(after[name])) for name in survivors}
    return {name: (was, now) for name, (was, now) in held.items() if any(number > was[kind] + _spare(kind) for kind, number in now.items())}


def _spare(kind: str) -> int:
    return SPARE_SOCKETS if kind == "socket" else 0


def _files_and_segments(state: ProcessState) -> Counter[str]:
    return Counter({**state.open_files, "segments": len(state.segments), "segment bytes": sum(state.segments.values())})


@contextmanager
def serving(serve_url: str, name: str, **changes: Any) -> Iterator[Served]:
    """Deploys `deploy/local.yaml` with `changes` to its args, under its own prefix."""
    from ray import serve

    from deploy.app import build

    args = _args(changes)
    serve.run(build(args), name=name, route_prefix=f"/{name}")
    try:
        yield _served(serve_url, name, args)
    finally:
        serve.delete(name)


@dataclass(frozen=True, slots=True)
class Declared:
    """An application that is deployed from a config file, as `serve deploy` does; a pool's size is not among its args there."""

    served: Served
    args: Mapping[str, Any]

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Deploys the file again, with other numbers of replicas; does not wait."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        content = yaml.safe_load(LOCAL.read_text())
        [application] = content["applications"]
        name = self.served.name
        deployments = [{"name": deployment, "num_replicas": number} for deployment, number in replicas.items()]
        application |= {"name": name, "route_prefix": f"/{name}", "args": dict(self.args), "deployments": deployments}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}), _blocking=False)  # type: ignore[union-attr]


@contextmanager
def declaring(serve_url: str, name: str, *, replicas: Mapping[str, int], **changes: Any) -> Iterator[Declared]:
    """As `serving`, with so many `replicas` of some deployments, and with `Declared.scale`."""
    from ray import serve

    args = _args(changes)
    declared = Declared(_served(serve_url, name, args), args)
    declared.scale(replicas)
    try:
        _await_running(name)
        yield declared
    finally:
        serve.delete(name)


def _await_running(name: str) -> None:
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    deadline_s = time.monotonic() + 300
    while (application := serve.status().applications.get(name)) is None or application.status != ApplicationStatus.RUNNING:
        assert time.monotonic() < deadline_s, application
        assert application is None or application.status != ApplicationStatus.DEPLOY_FAILED, application.message
        time.sleep(0.1)


def _args(changes: Mapping[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = yaml.safe_load(LOCAL.read_text())["applications"][0]["args"]
    args["gateway"]["grpc_port"] = free_port()
    args["router"]["capacity_wait_s"] = CAPACITY_WAIT_S
    for key, value in changes.items():
        args[key] = {**args.get(key, {}), **value} if isinstance(value, dict) else value
    return args


def _served(serve_url: str, name: str, args: Mapping[str, Any]) -> Served:
    return Served(name, f"{serve_url}/{name}", f"127.0.0.1:{args['gateway']['grpc_port']}")
