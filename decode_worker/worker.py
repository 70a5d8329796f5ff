"""A decode worker put together: engine, intake and Decode service on one endpoint. In colocated mode it prefills as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.books import ProcessBooks
from cluster.engine.engine import Engine
from cluster.engine.load import EngineLoad
from cluster.kv_transfer.base import DataPlane
from cluster.kv_transfer.peers import Peers
from cluster.pb.worker_pb2_grpc import add_DecodeServicer_to_server
from cluster.types import WorkerLoad, WorkerRole
from cluster.worker.settings import WorkerSettings
from cluster.worker.worker import Worker
from decode_worker.block_reader import Destination
from decode_worker.intake import Intake
from decode_worker.metrics import TransferMetrics
from decode_worker.service import DecodeService


class DecodeWorker(Worker):
    """Made and used on one event loop: construct, `start`, and in the end `drain` and `close`."""

    def __init__(self, settings: WorkerSettings, engine: Engine, planes: Sequence[DataPlane]) -> None:
        """`planes` read into the engine's pool, in order of preference; the worker closes them."""
        super().__init__(settings, engine)
        self._planes = planes
        self.peers = Peers(planes, layout=engine.layout, checkpoint=engine.checkpoint, secret=settings.secret, faults=settings.faults)
        destination = Destination(
            pool=engine.kv_cache.storage,
            layout=engine.layout,
            checkpoint=engine.checkpoint,
            incarnation=settings.identity.incarnation,
            zero_tail=engine.kv_cache.zero_tail,
        )
        self.intake = Intake(self.engine_loop, destination, self.peers.get, settings.transfer, settings.faults)
        service = DecodeService(
            self.engine_loop,
            self.intake,
            self.calls,
            TransferMetrics(settings.registry),
            may_prefill=settings.identity.role is WorkerRole.COLOCATED,
            faults=settings.faults,
        )
        self.endpoint.add(lambda server: add_DecodeServicer_to_server(service, server))

    def _with(self, load: EngineLoad) -> WorkerLoad:
        return replace(super()._with(load), kv_peers=self.peers.choices)

    async def books(self) -> ProcessBooks:
        books = await super().books()
        return replace(books, held={**books.held, "handoffs": len(self.intake)}, peers=self.peers.incarnations)

    async def close(self, grace_s: float = 0.0) -> None:
        await super().close(grace_s)
        self.intake.close()
        await self.peers.close()
        for plane in self._planes:
            await plane.close()
