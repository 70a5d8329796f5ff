"""Values that the router's tests are made of: a clock that is moved by hand, reports, requests, a router with workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from cluster.config import RouterConfig
from cluster.kv_layout import KVLayout
from cluster.types import AdmitRequest, OrderKey, Placement, WorkerLoad, WorkerRole, WorkerState
from router.control.metrics import RouterMetrics
from router.control.router import Router

DISAGGREGATED: Mapping[WorkerRole, int] = {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 1}
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, kv_dtype="bf16")
COLOCATED: Mapping[WorkerRole, int] = {WorkerRole.COLOCATED: 1}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def load(worker_id: str, role: WorkerRole = WorkerRole.DECODE, **changes: Any) -> WorkerLoad:
    """An idle worker: 100 blocks of 16 tokens, 10 of them reserved, 8 sequences, steps of 128 tokens."""
    idle = WorkerLoad(
        worker_id=worker_id,
        incarnation=f"{worker_id}#1",
        role=role,
        state=WorkerState.RUNNING,
        endpoint=f"{worker_id}:1",
        node_id="n",
        checkpoint="c",
        domain="d",
        max_model_len=1024,
        layout=LAYOUT,
        num_blocks=100,
        num_reserved_blocks=10,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_blocks_free=100,
    )
    return replace(idle, **changes)


def prefill_load(worker_id: str = "p", **changes: Any) -> WorkerLoad:
    return load(worker_id, WorkerRole.PREFILL, **changes)


def request(request_id: str, num_prompt_tokens: int = 32, max_tokens: int = 32, **changes: Any) -> AdmitRequest:
    return replace(AdmitRequest(request_id, "g", num_prompt_tokens, max_tokens), **changes)


def key(virtual_deadline_s: float, arrival: int = 0) -> OrderKey:
    return OrderKey(virtual_deadline_s, arrival)


class Cluster:
    """A router under test, its clock and its metrics."""

    def __init__(self, expected: Mapping[WorkerRole, int] = DISAGGREGATED, **config: Any) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.config = RouterConfig(**{"capacity_wait_s": 5.0, **config})
        self.expected = expected
        self.router = self.new_router(epoch=1)

    def new_router(self, epoch: int) -> Router:
        """A further life of the router, with empty books."""
        self.registry = CollectorRegistry()
        return Router(self.config, self.expected, now=self.clock, epoch=epoch, metrics=RouterMetrics(self.registry))

    def report(self, *loads: WorkerLoad) -> None:
        for each in loads:
            self.router.report(each)

    def admit(self, *requests: AdmitRequest) -> list[asyncio.Task[Placement]]:
        """Starts admits, in order; `settle` lets them run."""
        return [asyncio.create_task(self.router.admit(each), name=each.request_id) for each in requests]

    async def place(self, wanted: AdmitRequest) -> Placement:
        """An admit that is answered at once."""
        return await answered(self.admit(wanted)[0])

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value; 0 when it was never touched."""
        return self.registry.get_sample_value(name, labels) or 0.0


async def settle() -> None:
    """Lets every task run until it waits for something that only the test can bring about."""
    for _ in range(10):
        await asyncio.sleep(0)


async def answered(task: asyncio.Task[Placement]) -> Placement:
    """What a held call that needs nothing more is answered with: a test fails here instead of waiting for ever."""
    await settle()
    if not task.done():
        task.cancel()
        raise AssertionError(f"{task.get_name()} is still held")
    return task.result()


def names(tasks: list[asyncio.Task[Placement]]) -> list[str]:
    """Those that have been answered with a placement."""
    return [task.get_name() for task in tasks if task.done() and not task.cancelled() and task.exception() is None]


def ready_cluster(**config: Any) -> Cluster:
    """One idle prefill worker `p`, and one idle decode worker `d`."""
    cluster = Cluster(**config)
    cluster.report(prefill_load(), load("d"))
    return cluster


def full_cluster(**config: Any) -> Cluster:
    """Its one decode worker has room for nothing."""
    cluster = Cluster(**config)
    cluster.report(prefill_load(), load("d", num_seqs_running=8))
    return cluster


def prefill_of(placement: Placement) -> str:
    """The prefill worker's incarnation."""
    assert placement.prefill is not None
    return placement.prefill.incarnation


def assert_empty(cluster: Cluster) -> None:
    """The router holds nothing, and finds its books right."""
    books = cluster.router.books()
    assert (books.faults, books.requests) == ((), ())
    assert not any(books.held.values()), books.held
    assert cluster.router.queue.num_tokens == 0
