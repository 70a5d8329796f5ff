"""The Prefill service: one stream for each prompt, open until its KV is taken.

    call ──► admitted ──► KVOffer      blocks are allocated
                          Ready*       chunk after chunk is computed, and readable from then on
                          FirstToken   the lease starts (or the request is done, and nothing is leased)
                          … open …     ──► taken: OK   ──► lease over: TicketStale

Wherever the stream ends, whoever ends it, its blocks are given back: the engine's sequence is aborted, and the lease withdrawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from grpc import aio

from cluster import convert, wire
from cluster.engine.events import Allocated, Computed, EngineEvent, Failed, Token
from cluster.errors import InternalError, TicketStale
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.kv_ticket import KVTicket
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import PrefillServicer
from cluster.types import Request
from cluster.worker.batches import EventBatches
from cluster.worker.calls import LiveCalls
from cluster.worker.checksums import block_checksums
from prefill_worker.issuer import TicketIssuer
from prefill_worker.outbox import LeaseEnd, Outbox

Write = Callable[[pb.PrefillEvent], Awaitable[None]]


class PrefillEngine(Protocol):
    """The part of `EngineLoop` that prefill needs."""

    def prefill(self, request: Request) -> EventBatches:
        """Allocated, Computed*, then one Token."""


class PrefillService(PrefillServicer):
    """Answers `baton.worker.v1.Prefill`."""

    def __init__(
        self,
        engine: PrefillEngine,
        outbox: Outbox,
        issuer: TicketIssuer,
        calls: LiveCalls,
        checksum_pool: torch.Tensor | None,
        *,
        faults: FaultInjector = NO_FAULTS,
    ) -> None:
        """`checksum_pool` is the KV pool, when tickets shall carry checksums."""
        self._engine = engine
        self._outbox = outbox
        self._issuer = issuer
        self._calls = calls
        self._checksum_pool = checksum_pool
        self._faults = faults

    async def Prefill(  # type: ignore[override]  # noqa: N802  # the stubs know generators only; writing keeps cancels prompt
        self, message: pb.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        request = convert.request_from_pb(message.request)
        await self._calls.serve(message.header, request.key, context, lambda: self._prefill(request, context.write))

    async def _prefill(self, request: Request, write: Write) -> None:
        run = _PrefillRun(request, self._outbox, self._issuer, self._checksum_pool, self._faults, write, time.monotonic())
        try:
            async with aclosing(self._engine.prefill(request)) as batches:
                async for events in batches:
                    await run.handle(events)
            await run.wait_until_taken()
        finally:
            self._outbox.withdraw(request.key)


@dataclass(slots=True)
class _PrefillRun:
    """One stream, from the first event of the engine to the end of the lease."""

    request: Request
    outbox: Outbox
    issuer: TicketIssuer
    checksum_pool: torch.Tensor | None
    faults: FaultInjector
    write: Write
    started_s: float
    allocated_s: float = 0.0
    ticket: KVTicket | None = None
    lease_end: asyncio.Future[LeaseEnd] | None = None

    async def handle(self, events: list[EngineEvent]) -> None:
        """Passes on what the engine said at once. Of several marks the last says all."""
        marks = [event for event in events if isinstance(event, Computed)]
        for event in events:
            match event:
                case Allocated():
                    await self._offer(event)
                case Computed() if event is marks[-1]:
                    self.outbox.mark(self.request.key, event.num_computed_tokens)
                    await self.write(pb.PrefillEvent(ready=pb.Ready(upto_token=event.num_computed_tokens)))
                case Token():
                    await self._first_token(event)
                case Failed():
                    raise InternalError(event.message)

    async def wait_until_taken(self) -> None:
        """Returns after the commit, or at once when nothing was leased.

        Raises:
            TicketStale: the lease ran out.
        """
        if self.lease_end is not None and await self.lease_end != LeaseEnd.TAKEN:
            raise TicketStale(f"nobody took the KV of {self.request.key} in time")

    async def _offer(self, event: Allocated) -> None:
        self.ticket = self.issuer.offer(self.request, event.blocks)
        self.outbox.offer(self.ticket)
        self.outbox.mark(self.request.key, event.num_cached_tokens)
        self.allocated_s = event.at_s
        ticket = await self.faults.carry(FaultPoint.OFFER, wire.encode(self.ticket))
        offer = pb.KVOffer(ticket=ticket, num_cached_tokens=event.num_cached_tokens, wait_s=self.allocated_s - self.started_s)
        await self.write(pb.PrefillEvent(offer=offer))

    async def _first_token(self, event: Token) -> None:
        first_token = pb.FirstToken(
            output=convert.output_to_pb(event.output), finish_reason=convert.finish_reason_to_pb(event.finish_reason)
        )
        if event.finish_reason is None:
            first_token.ticket = await self.faults.carry(FaultPoint.FIRST_TOKEN, wire.encode(await self._lease(event)))
        first_token.prefill_s = time.monotonic() - self.allocated_s
        await self.write(pb.PrefillEvent(first_token=first_token))

    async def _lease(self, event: Token) -> KVTicket:
        assert self.ticket is not None, "a token before its blocks"
        ticket = replace(self.ticket, first_token=event.output)
        if self.checksum_pool is not None:
            ticket = replace(ticket, checksums=await block_checksums(self.checksum_pool, [ref.block_id for ref in ticket.blocks]))
        self.lease_end = self.outbox.complete(ticket)
        return ticket
