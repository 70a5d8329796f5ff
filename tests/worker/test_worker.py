from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cluster import wire
from cluster.config import PoolConfig, TransferConfig
from cluster.engine.sequence import ScheduledSequence
from cluster.errors import Draining, InternalError
from cluster.pb import worker_pb2 as pb
from cluster.types import ReportReply, TokenOutput, WorkerLoad, WorkerRole, WorkerState
from cluster.worker.identity import WorkerIdentity
from cluster.worker.settings import WorkerSettings
from cluster.worker.worker import Worker
from tests.engine.fakes import make_engine, make_request


@dataclass
class FakeRouter:
    reports: list[WorkerLoad] = field(default_factory=list)
    epoch: int = 3
    hangs: bool = False

    async def send(self, data: bytes) -> bytes:
        if self.hangs:
            await asyncio.Event().wait()
        self.reports.append(wire.decode(WorkerLoad, data))
        return wire.encode(ReportReply(self.epoch))


@asynccontextmanager
async def working(stall_timeout_s: float = 60.0) -> AsyncIterator[tuple[Worker, FakeRouter, CollectorRegistry]]:
    router, registry = FakeRouter(), CollectorRegistry()
    engine, _ = make_engine()
    identity = WorkerIdentity.draw("w", WorkerRole.DECODE, "node")
    pool = PoolConfig(stall_timeout_s=stall_timeout_s, drain_timeout_s=1)
    worker = Worker(WorkerSettings(identity, pool, TransferConfig(), "secret", router.send, registry=registry), engine)
    await worker.start()
    try:
        yield worker, router, registry
    finally:
        await worker.close()
        await worker.close()


def set_run(worker: Worker, run: Callable[[Sequence[ScheduledSequence]], list[TokenOutput | None]]) -> None:
    worker.engine._runner.run = run  # type: ignore[method-assign, assignment]


async def test_two_lives_differ() -> None:
    first, second = (WorkerIdentity.draw("w", WorkerRole.DECODE, "node") for _ in range(2))
    assert first.worker_id == second.worker_id and first.incarnation != second.incarnation


async def test_its_reports_describe_it_and_teach_it_the_routers_epoch() -> None:
    async with working() as (worker, router, _):
        assert await worker.reporter.report()
        load = router.reports[-1]
        assert (load.worker_id, load.incarnation, load.endpoint) == ("w", worker.gate.incarnation, worker.endpoint.address)
        assert load.state is WorkerState.RUNNING and load.layout == worker.engine.layout
        assert load.num_blocks == load.num_blocks_free == worker.engine.num_blocks
        assert (load.block_size, load.max_num_seqs) == (worker.engine.layout.block_size, worker.engine.limits.max_num_seqs)
        assert worker.gate.router_epoch == 3


async def test_a_report_counts_what_was_just_freed() -> None:
    async with working() as (worker, router, _):
        request = make_request("r", [1, 2, 3])
        async with aclosing(worker.engine_loop.prefill(request)) as batches:
            async for _ in batches:
                pass
        await worker.reporter.report()
        assert (router.reports[-1].num_blocks_leased, router.reports[-1].live_requests) == (1, (request.key,))
        worker.engine_loop.abort(request.key)
        await worker.reporter.report()
        assert (router.reports[-1].num_blocks_leased, router.reports[-1].live_requests) == (0, ())


async def test_health_is_progress_of_the_own_engine() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang(rows: Sequence[ScheduledSequence]) -> list[TokenOutput | None]:
        entered.set()
        leave.wait(10)
        return [TokenOutput(1) for _ in rows]

    async with working(stall_timeout_s=0.02) as (worker, _, _):
        worker.check_health()
        set_run(worker, hang)
        async with aclosing(worker.engine_loop.prefill(make_request("r", [1, 2, 3]))) as batches:
            await asyncio.to_thread(entered.wait, 10)
            await asyncio.sleep(0.03)
            with pytest.raises(InternalError, match="no step"):
                worker.check_health()
            assert await asyncio.wait_for(worker.reporter.report(), 5), "a stalled engine does not silence the worker"
            leave.set()
            assert [event async for events in batches for event in events]
        await worker.engine_loop.run(lambda engine: None)
        worker.check_health()


async def test_a_broken_engine_is_unhealthy_and_gets_no_new_work() -> None:
    def fail(_rows: Sequence[ScheduledSequence]) -> list[TokenOutput | None]:
        raise RuntimeError("the device is gone")

    async with working() as (worker, router, _):
        set_run(worker, fail)
        for number in range(5):
            async with aclosing(worker.engine_loop.prefill(make_request(f"r{number}", [1, 2, 3]))) as batches:
                try:
                    async for _ in batches:
                        pass
                except InternalError:
                    break
        with pytest.raises(InternalError, match="broken"):
            worker.check_health()
        await worker.reporter.report()
        assert router.reports[-1].state is WorkerState.DRAINING
        with pytest.raises(Draining):
            worker.gate.check(pb.Header(incarnation=worker.gate.incarnation, router_epoch=router.epoch))


async def test_an_idle_worker_drains_at_once_and_says_so_first() -> None:
    async with working() as (worker, router, _):
        await asyncio.wait_for(worker.drain(), 0.5)
        assert router.reports[-1].state is WorkerState.DRAINING


async def test_a_drain_does_not_need_the_router() -> None:
    async with working() as (worker, router, _):
        router.hangs = True
        await asyncio.wait_for(worker.drain(), 0.9)


async def test_metrics_show_the_engine_and_end_with_the_worker() -> None:
    async with working() as (worker, _, registry):
        async with aclosing(worker.engine_loop.prefill(make_request("r", [1, 2, 3]))) as batches:
            async for _ in batches:
                pass
        await worker.engine_loop.run(lambda engine: None)
        text = generate_latest(registry).decode()
        assert 'baton_kv_blocks{state="leased"} 1.0' in text
        assert 'baton_kv_blocks{state="owned"} 0.0' in text
        assert "baton_tokens_total 3.0" in text
    assert generate_latest(registry) == b""
