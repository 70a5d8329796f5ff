"""A cluster in the test's own process: the real `Router`, a `Gateway`, and fake workers behind real gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client import CollectorRegistry

from cluster import wire
from cluster.config import GatewayConfig, RouterConfig
from cluster.errors import NoCapacity
from cluster.types import WorkerLoad, WorkerRole
from router.control.client import RouterClient
from router.control.metrics import RouterMetrics
from router.control.router import Router
from router.control.service import RouterService
from router.gateway.auditor import Auditor
from router.gateway.gateway import Gateway, GatewayParts
from router.gateway.metrics import GatewayMetrics
from router.gateway.model_card import ModelCard
from router.gateway.tokenizer import Tokenizer
from router.gateway.worker_clients import WorkerClients
from tests.eventually import eventually
from tests.router.gateway.fake_workers import MAX_MODEL_LEN, SECRET, FakeLease, FakeWorker

VOCAB_SIZE: Final = 352


class FakeCluster:
    """Router, workers and one gateway."""

    overlaps = True  # the fixture of that name changes it

    def __init__(self, tokenizer: Tokenizer, *, roles: tuple[WorkerRole, ...], router: RouterConfig, gateway: GatewayConfig) -> None:
        self.leases: dict[str, FakeLease] = {}
        self.workers = [FakeWorker(role, self.leases) for role in roles]
        self.registry = CollectorRegistry()
        self._router_config = router
        self._is_router_lost = self._is_router_stuck = False
        self.restart_router()
        self.clients = WorkerClients(SECRET)
        self.metrics = GatewayMetrics(self.registry)
        self.client = RouterClient(self._call_router)
        self._auditor = Auditor({"Gateway": self._gateway_books, "Router": self._router_books})
        self.gateway = Gateway(
            GatewayParts(
                overlaps=self.overlaps,
                card=ModelCard("tiny", 1_700_000_000, MAX_MODEL_LEN, VOCAB_SIZE, "baton-float32-kv_float32-reference"),
                tokenizer=tokenizer,
                router=self.client,
                workers=self.clients,
                config=gateway,
                metrics=self.metrics,
                metrics_text=self._metrics_text,
                cluster_books=self._auditor.books,
            )
        )

    @property
    def prefill(self) -> FakeWorker:
        return next(worker for worker in self.workers if worker.role is WorkerRole.PREFILL)

    @property
    def decode(self) -> FakeWorker:
        return next(worker for worker in self.workers if worker.role is not WorkerRole.PREFILL)

    def restart_router(self) -> None:
        """The next life of the router: it knows nothing."""
        roles = [worker.role for worker in self.workers]
        expected = {role: roles.count(role) for role in dict.fromkeys(roles)}
        self.router = Router(self._router_config, expected, metrics=RouterMetrics(CollectorRegistry()))
        self._service = RouterService(self.router)

    def lose_router(self) -> None:
        """No router answers any more."""
        self._is_router_lost = True

    def hang_router(self) -> None:
        """The router takes calls and answers none."""
        self._is_router_stuck = True

    async def _call_router(self, method: str, payload: bytes) -> bytes:
        if self._is_router_stuck:
            await asyncio.Event().wait()
        if self._is_router_lost:
            raise NoCapacity("the router cannot be reached")
        return await self._service.call(method, payload)  # of whichever life

    async def _metrics_text(self) -> str:
        return "baton_up 1\n"

    async def _gateway_books(self) -> Sequence[bytes]:
        return [wire.encode(self.gateway.books())]

    async def _router_books(self) -> Sequence[bytes]:
        if self._is_router_lost:
            raise RuntimeError("the router is gone")
        return [wire.encode(self.router.books())]

    async def start(self) -> None:
        counts = itertools.count()
        for worker in self.workers:
            await worker.start(f"{worker.role}-{next(counts)}")
        self._report()  # a process's first takes long, and no request shall wait for it
        self._pulse = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Reports and time, as the real ones come."""
        while True:
            self._report()
            self.router.sweep()
            await asyncio.sleep(0.02)

    def _report(self) -> None:
        for worker in self.workers:
            if worker.is_up:
                self.router.report(wire.decode(WorkerLoad, wire.encode(worker.load())))

    async def close(self) -> None:
        await self.gateway.close()
        self._pulse.cancel()
        await asyncio.gather(self._pulse, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def assert_idle(self) -> None:
        """Nothing is left of any request: at the router, in the gateway, at the workers."""
        await eventually(lambda: self.registry.get_sample_value("baton_gateway_live_requests") == 0)  # a client may know before the server
        await self.gateway.book.settle()
        await eventually(lambda: not (self.clients.num_calls or any(worker.live for worker in self.workers) or self.leases))
        assert len(self.router.live) == 0
        assert len(self.router.queue) == 0
        assert self.gateway.book.live_ids == ()
        for books in (self.gateway.books, self.router.books):
            await eventually(lambda books=books: not any(books().held.values()))  # type: ignore[misc]
            assert (books().faults, books().requests) == ((), ())

    def outcomes(self) -> dict[str, float]:
        """`baton_requests_total` by outcome, over all endpoints."""
        counts: dict[str, float] = {}
        for sample in (sample for family in self.metrics.requests.collect() for sample in family.samples):
            if sample.name.endswith("_total"):
                counts[sample.labels["outcome"]] = counts.get(sample.labels["outcome"], 0) + sample.value
        return counts


DISAGGREGATED: Final = (WorkerRole.PREFILL, WorkerRole.DECODE)
COLOCATED: Final = (WorkerRole.COLOCATED,)


@asynccontextmanager
async def fake_cluster(
    tokenizer: Tokenizer,
    roles: tuple[WorkerRole, ...] = DISAGGREGATED,
    *,
    router: RouterConfig | None = None,
    gateway: GatewayConfig | None = None,
    silent: tuple[WorkerRole, ...] = (),
) -> AsyncIterator[FakeCluster]:
    """Started, and idle at its end. Workers of the `silent` roles never report."""
    settings = router or RouterConfig(recovery_s=0.0, capacity_wait_s=0.2)
    cluster = FakeCluster(tokenizer, roles=roles, router=settings, gateway=gateway or GatewayConfig())
    for worker in cluster.workers:
        worker.is_up = worker.role not in silent
    await cluster.start()
    try:
        yield cluster
        await cluster.assert_idle()
    finally:
        await cluster.close()
