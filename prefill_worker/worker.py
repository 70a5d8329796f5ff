"""A prefill worker put together: engine, outbox, KV service and Prefill service on one endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cluster.books import ProcessBooks, faults_of
from cluster.engine.engine import Engine
from cluster.kv_transfer.base import DataPlane
from cluster.kv_transfer.selection import find_nccl, publish
from cluster.kv_transfer.service import KVService
from cluster.pb.worker_pb2_grpc import add_PrefillServicer_to_server
from cluster.worker.settings import WorkerSettings
from cluster.worker.worker import Worker
from prefill_worker.issuer import TicketIssuer
from prefill_worker.metrics import LeaseMetrics
from prefill_worker.outbox import Outbox
from prefill_worker.service import PrefillService


class PrefillWorker(Worker):
    """Made and used on one event loop: construct, `start`, and in the end `drain` and `close`."""

    def __init__(self, settings: WorkerSettings, engine: Engine, planes: Sequence[DataPlane]) -> None:
        """`planes` make the engine's pool readable; the worker closes them."""
        super().__init__(settings, engine)
        self._planes = planes
        self.outbox = Outbox(settings.transfer, asyncio.get_running_loop(), self._free, LeaseMetrics(settings.registry).count)
        issuer = TicketIssuer(
            incarnation=settings.identity.incarnation,
            endpoint=self.endpoint.address,
            layout=engine.layout,
            checkpoint=engine.checkpoint,
            domain=engine.domain,
            lease_s=settings.transfer.lease_s,
        )
        checksum_pool = engine.kv_cache.storage if settings.transfer.checksums else None
        service = PrefillService(self.engine_loop, self.outbox, issuer, self.calls, checksum_pool, faults=settings.faults)
        self.endpoint.add(lambda server: add_PrefillServicer_to_server(service, server))

    async def start(self) -> None:
        """Publishes the pool, then serves.

        Raises:
            PlaneUnavailable: the pool can be read on no data plane.
        """
        engine = self.engine
        kv_service = KVService(
            incarnation=self.gate.incarnation,
            layout=engine.layout,
            checkpoint=engine.checkpoint,
            domain=engine.domain,
            pool=engine.kv_cache.storage,
            planes=await publish(self._planes),
            checker=self.outbox,
            nccl=find_nccl(self._planes),
            faults=self._settings.faults,
        )
        self.endpoint.add(kv_service.register)
        await super().start()

    async def books(self) -> ProcessBooks:
        books = await super().books()
        faults = (*books.faults, *faults_of(self.outbox.check_integrity))
        return replace(books, held={**books.held, "leases": len(self.outbox)}, faults=faults)

    async def close(self, grace_s: float = 0.0) -> None:
        await super().close(grace_s)
        for plane in self._planes:
            await plane.close()

    def _free(self, key: str) -> None:
        self.engine_loop.abort(key)  # ends a lease too
        self.reporter.wake()
