"""Real workers in the test's own process, and a raw gRPC client for them. No router, no gateway, no Ray.

async with Workers(tiny_model("llama")) as workers:
    prefill, decode = await workers.start_prefill(), await workers.start_decode()
    answer = await workers.client.disaggregated(prefill, decode, make_request([1, 2, 3]))
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from grpc import aio
from prometheus_client import CollectorRegistry

from cluster import rpc, wire
from cluster.config import PoolConfig, TransferConfig
from cluster.engine.build import allocate_private, build_engine
from cluster.engine.engine import Engine
from cluster.errors import BatonError
from cluster.faults.injector import FaultInjector
from cluster.faults.points import FaultAction, FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.types import OrderKey, ReportReply, Request, SamplingParams, WorkerLoad, WorkerRole
from cluster.worker.identity import WorkerIdentity
from cluster.worker.settings import WorkerSettings
from cluster.worker.worker import Worker
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.kv_transfer.planes import PlaneMaker
from tests.tiny_models import VOCAB_SIZE
from tests.worker_client import ROUTER_EPOCH, SECRET, Client

_numbers = itertools.count()
W = TypeVar("W", bound=Worker)


def make_request(prompt: Sequence[int], *, request_id: str | None = None, attempt: int = 0, **sampling: Any) -> Request:
    """A request with its own id; greedy, 16 tokens, unless `sampling` says otherwise."""
    number = next(_numbers)
    params = SamplingParams(**{"max_tokens": 16, "seed": 1, "temperature": 0.0, "ignore_eos": True, **sampling})
    return Request(request_id or f"request-{number}", attempt, tuple(prompt), params, OrderKey(float(number), number))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """The same token ids each time."""
    return random.Random(f"{length}/{seed}").choices(range(4, VOCAB_SIZE), k=length)


def tiny_pool(**fields: Any) -> PoolConfig:
    """A pool config for tiny models: small blocks, small steps, so that prompts of a few tokens exercise everything."""
    defaults = {
        "scheme": "float32",
        "kv_dtype": "float32",
        "block_size": 8,
        "kv_cache_bytes": "2MiB",
        "swap_bytes": "1MiB",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "drain_timeout_s": 5,
    }
    return PoolConfig.model_validate({**defaults, **fields})


@dataclass
class Workers:
    """Starts workers of one model and ends them. Every worker has its own engine and endpoint."""

    folder: Path
    plane: str = "shared_memory"
    pool: PoolConfig = field(default_factory=tiny_pool)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    max_model_len: int | None = None
    faults: FaultInjectionConfig = field(default_factory=FaultInjectionConfig)
    reports: list[WorkerLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Client()
        self._planes = PlaneMaker(SECRET)
        self._reported = asyncio.Condition()
        self._started: list[Worker] = []
        self._num_threads = torch.get_num_threads()
        self._registries: list[CollectorRegistry] = []

    async def __aenter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for worker in reversed(self._started):
            await worker.close()
        torch.set_num_threads(self._num_threads)

    async def start_prefill(self, pool: PoolConfig | None = None) -> PrefillWorker:
        memory = PoolMemory() if self.plane == "shared_memory" else None
        allocate = allocate_private if memory is None else memory.allocate
        engine = build_engine(pool or self.pool, self.folder, max_model_len=self.max_model_len, allocate=allocate)
        settings = self._settings(WorkerRole.PREFILL, pool)
        return await self._start(
            PrefillWorker(settings, engine, [self._planes.make(self.plane, engine.kv_cache.storage, settings.identity.incarnation, memory)])
        )

    async def start_decode(self, pool: PoolConfig | None = None, role: WorkerRole = WorkerRole.DECODE) -> DecodeWorker:
        engine = build_engine(pool or self.pool, self.folder, max_model_len=self.max_model_len)
        settings = self._settings(role, pool)
        return await self._start(
            DecodeWorker(settings, engine, [self._planes.make(self.plane, engine.kv_cache.storage, settings.identity.incarnation)])
        )

    async def start_colocated(self, pool: PoolConfig | None = None) -> DecodeWorker:
        """One engine that does everything: the oracle of promise P1."""
        return await self.start_decode(pool, WorkerRole.COLOCATED)

    async def wait_for_report(self, is_it: Callable[[WorkerLoad], bool]) -> WorkerLoad:
        """The next report, from now on, for which `is_it` holds."""
        seen = len(self.reports)
        async with self._reported:
            await self._reported.wait_for(lambda: any(map(is_it, self.reports[seen:])))
        return next(filter(is_it, self.reports[seen:]))

    def num_injected(self, point: FaultPoint, action: FaultAction) -> int:
        """Faults that struck any worker."""
        labels = {"point": point.value, "action": action.value}
        return sum(int(found.get_sample_value("baton_injected_faults_total", labels) or 0) for found in self._registries)

    async def _start(self, worker: W) -> W:
        self._started.append(worker)
        await worker.start()
        return worker

    def _settings(self, role: WorkerRole, pool: PoolConfig | None) -> WorkerSettings:
        identity = WorkerIdentity.draw(f"{role}-{len(self._started)}", role, "node")
        registry = CollectorRegistry()
        self._registries.append(registry)
        faults = FaultInjector(self.faults, role=role, replica=len(self._started), registry=registry)
        return WorkerSettings(identity, pool or self.pool, self.transfer, SECRET, self._send, registry=registry, faults=faults)

    async def _send(self, report: bytes) -> bytes:
        async with self._reported:
            self.reports.append(wire.decode(WorkerLoad, report))
            self._reported.notify_all()
        return wire.encode(ReportReply(ROUTER_EPOCH))


async def error_of(call: Any) -> BatonError:
    """The error that ends a call; reads away what comes before."""
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as failure:
        return rpc.error_of(failure)
    raise AssertionError("the call ended well")


async def check_books(*workers: Worker) -> None:
    """Waits until nothing is being served, then: every block has one owner, and none is owned or leased."""
    for worker in workers:
        await worker.calls.wait_idle()
    for worker in workers:
        load = await worker.engine_loop.run(_checked_load)
        assert (load.num_blocks_owned, load.num_blocks_leased, load.live_keys) == (0, 0, ()), load
        if isinstance(worker, PrefillWorker):
            assert len(worker.outbox) == 0


def _checked_load(engine: Engine) -> Any:
    engine.check_integrity()
    return engine.load()
