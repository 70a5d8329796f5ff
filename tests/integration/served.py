"""One application of the demo model on the session's Serve, as the tests see it: over HTTP and gRPC, as clients do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import yaml
from openai import AsyncOpenAI

from tests.conftest import free_port

LOCAL = Path(__file__).parents[2] / "deploy/local.yaml"
CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running application."""

    name: str
    url: str
    grpc_target: str

    def client(self, **options: Any) -> AsyncOpenAI:
        """The openai client, without retries of its own."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)

    async def get(self, path: str) -> httpx2.Response:
        """One GET."""
        async with httpx2.AsyncClient(timeout=30) as client:
            return await client.get(self.url + path)

    async def books(self) -> dict[str, Any]:
        """`/v1/cluster`."""
        answer: dict[str, Any] = (await self.get("/v1/cluster")).json()
        return answer

    async def await_balance(self) -> None:
        """Returns when no block is owned or leased, no request is placed and none waits; that is bound to come soon."""
        deadline_s = time.monotonic() + CLOSE_S
        while left := _unbalanced(await self.books()):
            assert time.monotonic() < deadline_s, left
            await asyncio.sleep(0.1)  # the books are told twice a second, and only when asked

    async def await_ready(self) -> None:
        """Returns when `/ready` says so."""
        deadline_s = time.monotonic() + 60
        while (answer := await self.get("/ready")).status_code != 200:
            assert time.monotonic() < deadline_s, answer.text
            await asyncio.sleep(0.1)

    def pids(self, deployment: str) -> list[int]:
        """The processes of a deployment's replicas."""
        from ray.serve.context import _get_global_client

        details = _get_global_client().get_serve_details()  # type: ignore[union-attr]
        return [replica["pid"] for replica in details["applications"][self.name]["deployments"][deployment]["replicas"]]


def _unbalanced(books: dict[str, Any]) -> dict[str, Any]:
    left: dict[str, Any] = {"queue": books["queue"]["num_requests"], "placements": sum(books["live_placements"].values())}
    for role, pool in books["pools"].items():
        left |= {f"{role} {state}": pool["kv_blocks"][state] for state in ("owned", "leased")}
    return {name: value for name, value in left.items() if value}


@contextmanager
def serving(serve_url: str, name: str, **changes: Any) -> Iterator[Served]:
    """Deploys `deploy/local.yaml` with `changes` to its args, under its own prefix."""
    from ray import serve

    from deploy.app import build

    args = yaml.safe_load(LOCAL.read_text())["applications"][0]["args"]
    args["gateway"]["grpc_port"] = grpc_port = free_port()
    for key, value in changes.items():
        args[key] = {**args[key], **value} if isinstance(value, dict) else value
    serve.run(build(args), name=name, route_prefix=f"/{name}")
    try:
        yield Served(name, f"{serve_url}/{name}", f"127.0.0.1:{grpc_port}")
    finally:
        serve.delete(name)
