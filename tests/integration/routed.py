"""A whole cluster in the test's own process but for text: router, the gateway's runs, real workers over gRPC. No Ray.

async with routed(tiny_model("llama"), faults=…) as cluster:
    tokens = await cluster.tokens(make_request([1, 2, 3]))
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry

from cluster.config import RouterConfig
from cluster.types import Request, WorkerRole
from cluster.worker.worker import Worker
from router.control.client import RouterClient
from router.control.metrics import RouterMetrics
from router.control.router import SWEEP_INTERVAL_S, Router
from router.control.service import RouterService
from router.gateway.job import Job
from router.gateway.metrics import GatewayMetrics
from router.gateway.placements import PlacementBook
from router.gateway.run import RequestRun
from router.gateway.worker_clients import WorkerClients
from tests.harness import Workers, check_books
from tests.worker_client import SECRET

_TIMEOUT_S: Final = 120.0


class RoutedWorkers(Workers):
    """Workers that report to a router."""

    service: RouterService

    async def _send(self, report: bytes) -> bytes:
        await super()._send(report)
        return self.service.report(report)


@dataclass
class Routed:
    """One prefill and one decode worker, and what is around them."""

    workers: RoutedWorkers
    pair: tuple[Worker, Worker]
    router: Router
    book: PlacementBook
    clients: WorkerClients
    metrics: GatewayMetrics
    max_attempts: int
    overlaps: bool

    async def tokens(self, request: Request) -> list[int]:
        """The tokens of `request`, as its gateway would stream them.

        Raises:
            BatonError: as `RequestRun.tokens`.
        """
        now_s = time.monotonic()
        job = Job(request.request_id, request.prompt_token_ids, request.sampling, now_s, now_s + _TIMEOUT_S)
        run = RequestRun(
            job, self.book, self.clients, self.metrics, max_attempts=self.max_attempts, recomputes=True, overlaps=self.overlaps
        )
        async with aclosing(run.tokens()) as chunks:
            return [output.token_id async for chunk in chunks for output in chunk.outputs]

    async def check_books(self) -> None:
        """Nothing is held anywhere."""
        await self.book.settle()
        assert not self.book.request_ids
        await check_books(*self.pair)
        books = self.router.books()
        assert not any(books.held.values()), books.held
        assert books.faults == ()


@asynccontextmanager
async def routed(folder: Path, *, max_attempts: int = 3, overlaps: bool = True, **options: Any) -> AsyncIterator[Routed]:
    """`options` are those of `Workers`."""
    router = Router(RouterConfig(recovery_s=0.0), {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 1}, metrics=RouterMetrics(CollectorRegistry()))
    async with RoutedWorkers(folder, **options) as workers:
        workers.service = RouterService(router)
        book = PlacementBook(RouterClient(workers.service.call), "gateway")
        clients, metrics = WorkerClients(SECRET), GatewayMetrics(CollectorRegistry())
        tasks = [asyncio.create_task(_sweep(router)), asyncio.create_task(book.heartbeat_forever(1.0))]
        try:
            pair = (await workers.start_prefill(), await workers.start_decode())
            yield Routed(workers, pair, router, book, clients, metrics, max_attempts, overlaps)
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await clients.close()


async def _sweep(router: Router) -> None:
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        router.sweep()
