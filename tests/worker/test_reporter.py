from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster import wire
from cluster.kv_layout import KVLayout
from cluster.types import ReportReply, WorkerLoad, WorkerRole, WorkerState
from cluster.worker.reporter import LoadReporter

LOAD = WorkerLoad("w", "i", WorkerRole.DECODE, WorkerState.RUNNING, "h:1", "n", "c", "d", 64, KVLayout(2, 2, 16, 8, "bf16"), 10, 1, 4, 32)


async def load() -> WorkerLoad:
    return LOAD


class FakeRouter:
    """Takes reports; can be slow, gone or talk nonsense."""

    def __init__(self) -> None:
        self.received: list[WorkerLoad] = []
        self.arrived = asyncio.Condition()
        self.answer: Callable[[], bytes] = lambda: wire.encode(ReportReply(5))
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_sending = 0

    async def send(self, data: bytes) -> bytes:
        self.num_sending += 1
        assert self.num_sending == 1, "one report at a time"
        try:
            await self.hold.wait()
            async with self.arrived:
                self.received.append(wire.decode(WorkerLoad, data))
                self.arrived.notify_all()
            return self.answer()
        finally:
            self.num_sending -= 1

    async def wait_for(self, number: int) -> None:
        async with asyncio.timeout(5), self.arrived:
            await self.arrived.wait_for(lambda: len(self.received) >= number)


@asynccontextmanager
async def reporting(router: FakeRouter, epochs: list[int], interval_s: float = 60.0) -> AsyncIterator[LoadReporter]:
    reporter = LoadReporter(load, router.send, epochs.append, interval_s)
    reporter.start()
    try:
        yield reporter
    finally:
        await reporter.stop()
        await reporter.stop()


async def test_reports_at_start_and_then_every_interval() -> None:
    router = FakeRouter()
    epochs: list[int] = []
    async with reporting(router, epochs, interval_s=0.01):
        await router.wait_for(4)
    assert set(router.received) == {LOAD}
    assert set(epochs) == {5}


async def test_a_change_is_reported_long_before_the_interval() -> None:
    router = FakeRouter()
    async with reporting(router, []) as reporter:
        await router.wait_for(1)
        reporter.wake()
        await router.wait_for(2)


async def test_changes_gather_while_a_report_is_on_its_way() -> None:
    router = FakeRouter()
    async with reporting(router, []) as reporter:
        await router.wait_for(1)
        router.hold.clear()
        for _ in range(100):
            reporter.wake()
            await asyncio.sleep(0)
        router.hold.set()
        await router.wait_for(2)
        assert await reporter.report()
    assert len(router.received) <= 4


async def test_the_router_may_be_gone_and_come_back() -> None:
    router = FakeRouter()
    epochs: list[int] = []

    def gone() -> bytes:
        raise ConnectionError("no router")

    router.answer = gone
    async with reporting(router, epochs, interval_s=0.01) as reporter:
        await router.wait_for(2)
        assert not await reporter.report()
        router.answer = lambda: b"\xc1 not msgpack"
        assert not await reporter.report()
        assert epochs == []
        router.answer = lambda: wire.encode(ReportReply(6))
        assert await reporter.report()
    assert 6 in epochs


async def test_stop_does_not_wait_for_a_router_that_hangs() -> None:
    router = FakeRouter()
    router.hold.clear()
    async with asyncio.timeout(1), reporting(router, []):
        await asyncio.sleep(0)
