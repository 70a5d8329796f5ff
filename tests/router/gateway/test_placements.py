"""The calls of a gateway's book that must outlive their requests."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from cluster import wire
from cluster.types import AdmitRequest, OrderKey, Placement, WorkerAddress
from router.control.client import RouterClient
from router.control.messages import Method, seal
from router.gateway.placements import PlacementBook

REQUEST: ContextVar[str] = ContextVar("what Serve knows of the request that is being served", default="none")
PLACEMENT = Placement("r", 1, OrderKey(1.0, 0), WorkerAddress("d", "d#1", "d:1"))


class RouterInServe:
    """Answers every call after a round trip, and cancels with a request, as Serve does, all calls that came from its context."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self._pending: dict[asyncio.Task[None], str] = {}

    async def call(self, method: str, _payload: bytes) -> bytes:
        trip = asyncio.create_task(asyncio.sleep(0.01))
        self._pending[trip] = REQUEST.get()
        await trip
        self.arrived.append(method)
        return seal(wire.encode(PLACEMENT) if method == Method.ADMIT else b"")

    def cancel(self, request: str) -> None:
        for trip, of in self._pending.items():
            if of == request:
                trip.cancel()


async def test_the_end_of_a_request_arrives_though_serve_cancels_what_the_request_called() -> None:
    router = RouterInServe()
    book = PlacementBook(RouterClient(router.call), "g")

    async def serve() -> None:
        REQUEST.set("one")
        await book.admit(AdmitRequest("r", "g", num_prompt_tokens=4, max_tokens=8))
        book.prefill_done("r")
        book.finish("r")

    await asyncio.create_task(serve())
    await asyncio.sleep(0)  # both calls are on their way
    router.cancel("one")
    await book.settle()
    assert router.arrived == [Method.ADMIT, Method.PREFILL_DONE, Method.FINISH]
