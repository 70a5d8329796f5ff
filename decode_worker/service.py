"""The Decode service: one stream for each sequence, from its prompt's KV to its last token.

    with a ticket   ──► KVTaken ──► Tokens*        (or Declined alone: no room now)
    without         ──► Prefilled ──► Tokens*      where this worker may prefill: the first token included

Tokens that are ready together travel together, so a reader that is slow costs messages, not latency. Cancelling the call at any
moment frees the sequence and its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

from grpc import aio

from cluster import convert
from cluster.engine.engine import Reservation
from cluster.engine.events import Allocated, EngineEvent, Failed, Token
from cluster.errors import BatonError, InternalError, WorkerRefusal
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.kv_ticket import KVTicket
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import DecodeServicer
from cluster.types import Request, TokenOutput
from cluster.worker.batches import EventBatches
from cluster.worker.calls import LiveCalls
from decode_worker.intake import Intake, Taken
from decode_worker.metrics import TransferMetrics

RETRY_AFTER_S: Final = 0.25  # when a declined ticket may be offered here again

Write = Callable[[pb.DecodeEvent], Awaitable[None]]


class DecodeEngine(Protocol):
    """The part of `EngineLoop` that decode needs."""

    def decode(self, reservation: Reservation, first_token: TokenOutput) -> EventBatches:
        """Tokens from the second one on."""

    def generate(self, request: Request) -> EventBatches:
        """Allocated, Computed*, Token*."""


class DecodeService(DecodeServicer):
    """Answers `baton.worker.v1.Decode`."""

    def __init__(
        self,
        engine: DecodeEngine,
        intake: Intake,
        calls: LiveCalls,
        metrics: TransferMetrics,
        *,
        may_prefill: bool,
        faults: FaultInjector = NO_FAULTS,
    ) -> None:
        """`may_prefill`: requests without a ticket are prefilled here (a colocated worker)."""
        self._engine = engine
        self._intake = intake
        self._calls = calls
        self._metrics = metrics
        self._may_prefill = may_prefill
        self._faults = faults

    async def Decode(  # type: ignore[override]  # noqa: N802  # the stubs know generators only; writing keeps cancels prompt
        self, message: pb.DecodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        request = convert.request_from_pb(message.request)
        await self._calls.serve(message.header, request.key, context, lambda: self._serve(request, message.ticket, context.write))

    async def _serve(self, request: Request, ticket: bytes, write: Write) -> None:
        if ticket:
            await self._decode(request, KVTicket.unpack(ticket), write)
        elif self._may_prefill:
            await self._generate(request, write)
        else:
            raise WorkerRefusal("this worker does not prefill: a request needs a ticket", param="ticket")

    async def _decode(self, request: Request, ticket: KVTicket, write: Write) -> None:
        taken = await self._take(request, ticket)
        if taken is None:
            await write(pb.DecodeEvent(declined=pb.Declined(reason="no room for the prompt now", retry_after_s=RETRY_AFTER_S)))
            return
        stream = _TokenStream(write, self._faults, waiting_since_s=time.monotonic())
        async with aclosing(self._engine.decode(taken.reservation, taken.first_token)) as batches:
            await self._faults.reach(FaultPoint.DECODE_TAKEN)
            await write(pb.DecodeEvent(taken=_taken_to_pb(taken)))
            async for events in batches:
                await stream.write_tokens(events)

    async def _take(self, request: Request, ticket: KVTicket) -> Taken | None:
        try:
            taken = await self._intake.take(request, ticket)
        except BatonError as error:
            self._metrics.failed(error.code)
            raise
        if taken is None:
            self._metrics.declined()
        else:
            self._metrics.taken(taken.plane, taken.num_bytes, taken.transfer_s)
        return taken

    async def _generate(self, request: Request, write: Write) -> None:
        stream = _TokenStream(write, self._faults)
        prefill = _LocalPrefill(started_s=time.monotonic())
        async with aclosing(self._engine.generate(request)) as batches:
            async for events in batches:
                prefilled = prefill.follow(events)
                if prefilled is not None:
                    await write(pb.DecodeEvent(prefilled=prefilled))
                await stream.write_tokens(events)
                if prefilled is not None:
                    stream.waiting_since_s = time.monotonic()


@dataclass(slots=True)
class _LocalPrefill:
    """Times the prefill of a request that one worker serves alone."""

    started_s: float
    allocated: Allocated | None = None
    is_done: bool = False

    def follow(self, events: list[EngineEvent]) -> pb.Prefilled | None:
        """What there is to say once the first token is among `events`; it is said once."""
        for event in events:
            match event:
                case Allocated():
                    self.allocated = event
                case Token() if not self.is_done:
                    self.is_done = True
                    return self._prefilled()
        return None

    def _prefilled(self) -> pb.Prefilled:
        assert self.allocated is not None, "a token before its blocks"
        return pb.Prefilled(
            num_cached_tokens=self.allocated.num_cached_tokens,
            wait_s=self.allocated.at_s - self.started_s,
            prefill_s=time.monotonic() - self.allocated.at_s,
        )


@dataclass(slots=True)
class _TokenStream:
    """Writes tokens; the first message after the prompt's KV is there and its first token is out also says where the time went."""

    write: Write
    faults: FaultInjector
    waiting_since_s: float | None = None  # for its first decode step

    async def write_tokens(self, events: list[EngineEvent]) -> None:
        """One message for all tokens among `events`.

        Raises:
            InternalError: the engine gave the sequence up.
        """
        tokens = [event for event in events if isinstance(event, Token)]
        if tokens:
            await self.faults.reach(FaultPoint.DECODE_TOKENS)
            await self.write(pb.DecodeEvent(tokens=self._message(tokens)))
        for event in events:
            if isinstance(event, Failed):
                raise InternalError(event.message)

    def _message(self, tokens: list[Token]) -> pb.Tokens:
        message = pb.Tokens(
            outputs=[convert.output_to_pb(token.output) for token in tokens],
            finish_reason=convert.finish_reason_to_pb(tokens[-1].finish_reason),
        )
        if self.waiting_since_s is not None:
            started_s = max(tokens[0].step_started_s, self.waiting_since_s)  # after a local prefill the engine may have gone on at once
            message.decode_wait_s = started_s - self.waiting_since_s
            message.step_s = time.monotonic() - started_s
            self.waiting_since_s = None
        return message


def _taken_to_pb(taken: Taken) -> pb.KVTaken:
    return pb.KVTaken(plane=taken.plane, num_bytes=taken.num_bytes, wait_s=taken.wait_s, transfer_s=taken.transfer_s)
