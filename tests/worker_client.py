"""A raw gRPC client of workers: calls them as a gateway would, without its conveniences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from grpc import aio

from cluster import convert, rpc, wire
from cluster.kv_ticket import KVTicket
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import DecodeStub, PrefillStub
from cluster.types import FinishReason, Request, TokenOutput
from cluster.worker.worker import Worker

SECRET = "secret of the tests"
ROUTER_EPOCH = 1


@dataclass(frozen=True)
class Answer:
    """All that a client could see of a request."""

    outputs: tuple[TokenOutput, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return [output.token_id for output in self.outputs]


@dataclass(frozen=True)
class Elsewhere:
    """A worker in another process, as far as a client needs to know it."""

    address: str
    incarnation: str


class Client:
    """Calls workers as a gateway would, without its conveniences."""

    def __init__(self) -> None:
        self._channels: dict[str, aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    def prefill(self, worker: Worker | Elsewhere, request: Request, **header: Any) -> Any:
        """The open call; iterate it for `PrefillEvent`s."""
        message = pb.PrefillRequest(header=_header(worker, header), request=convert.request_to_pb(request))
        return PrefillStub(self._channel(worker)).Prefill(message, metadata=rpc.secret_metadata(SECRET), timeout=60)

    def decode(self, worker: Worker | Elsewhere, request: Request, ticket: bytes = b"", **header: Any) -> Any:
        """The open call; iterate it for `DecodeEvent`s."""
        message = pb.DecodeRequest(header=_header(worker, header), request=convert.request_to_pb(request), ticket=ticket)
        return DecodeStub(self._channel(worker)).Decode(message, metadata=rpc.secret_metadata(SECRET), timeout=60)

    async def colocated(self, worker: Worker | Elsewhere, request: Request) -> Answer:
        """The whole request on one worker."""
        events = [event async for event in self.decode(worker, request)]
        assert events[0].WhichOneof("event") == "prefilled"
        return _answer([], events[1:], events[0].prefilled.num_cached_tokens)

    async def disaggregated(self, prefill: Worker | Elsewhere, decode: Worker, request: Request) -> Answer:
        """The whole request over both workers; the prefill stream must end well after the commit."""
        first = await self.first_token(self.prefill(prefill, request))
        if not first.ticket:
            assert await anext(first.rest, None) is None
            reason = convert.finish_reason_from_pb(first.event.finish_reason)
            return Answer((convert.output_from_pb(first.event.output),), reason, first.num_cached_tokens)
        events = await self._decoded(decode, request, first.ticket)
        assert await anext(first.rest, None) is None, "nothing follows the commit"
        return _answer([first.event.output], events[1:], first.num_cached_tokens)

    async def overlapped(self, prefill: Worker | Elsewhere, decode: Worker, request: Request) -> Answer:
        """As `disaggregated`, but the decode worker is asked with the offer; what it says of that is only right after the first token."""
        events = aiter(self.prefill(prefill, request))
        offer = (await anext(events)).offer
        decoding = asyncio.create_task(self._decoded(decode, request, offer.ticket))
        last = [event async for event in events][-1]  # to the commit, or to the end of a request that had but one token
        if not last.first_token.ticket:
            decoding.cancel()
            reason = convert.finish_reason_from_pb(last.first_token.finish_reason)
            return Answer((convert.output_from_pb(last.first_token.output),), reason, offer.num_cached_tokens)
        return _answer([last.first_token.output], (await decoding)[1:], offer.num_cached_tokens)

    async def _decoded(self, worker: Worker | Elsewhere, request: Request, ticket: bytes) -> list[pb.DecodeEvent]:
        """All events from a worker that has room sooner or later."""
        while True:
            events = [event async for event in self.decode(worker, request, ticket)]
            if events[0].WhichOneof("event") == "taken":
                return events
            await asyncio.sleep(events[0].declined.retry_after_s)

    async def both_legs(self, prefill: Worker | Elsewhere, decode: Worker, request: Request) -> AsyncGenerator[Any, None]:
        """Every event of the request in order. Closing it early cancels whatever is open, as a gateway does whose client left."""
        calls = [self.prefill(prefill, request)]
        ticket = b""
        try:
            async for event in calls[0]:
                yield event
                if event.WhichOneof("event") == "first_token":
                    ticket = event.first_token.ticket
                    break
            if ticket:
                calls.append(self.decode(decode, request, ticket))
                async for event in calls[1]:
                    yield event
        finally:
            for call in calls:
                call.cancel()

    async def first_token(self, call: Any) -> FirstToken:
        """Reads a prefill stream up to its first token, and checks the order of its events."""
        events = aiter(call)
        offer = await anext(events)
        assert offer.WhichOneof("event") == "offer"
        marks = []
        async for event in events:
            if event.WhichOneof("event") == "ready":
                marks.append(event.ready.upto_token)
                continue
            assert event.WhichOneof("event") == "first_token"
            assert marks == sorted(set(marks))
            return FirstToken(call, event.first_token, offer.offer.ticket, offer.offer.num_cached_tokens, marks, events)
        raise AssertionError("the stream ended without a first token")

    def _channel(self, worker: Worker | Elsewhere) -> aio.Channel:
        address = worker.address if isinstance(worker, Elsewhere) else worker.endpoint.address
        if address not in self._channels:
            self._channels[address] = rpc.channel(address)
        return self._channels[address]


@dataclass(frozen=True)
class FirstToken:
    """A prefill stream that has said its first token and is still open."""

    call: Any
    event: pb.FirstToken
    offer: bytes
    num_cached_tokens: int
    marks: list[int]
    rest: AsyncIterator[pb.PrefillEvent]

    @property
    def ticket(self) -> bytes:
        return self.event.ticket

    @property
    def decoded_ticket(self) -> KVTicket:
        return wire.decode(KVTicket, self.event.ticket)


def _header(worker: Worker | Elsewhere, fields: dict[str, Any]) -> pb.Header:
    incarnation = worker.incarnation if isinstance(worker, Elsewhere) else worker.gate.incarnation
    return pb.Header(**{"incarnation": incarnation, "router_epoch": ROUTER_EPOCH, **fields})


def _answer(first: list[pb.TokenOutput], events: list[pb.DecodeEvent], num_cached_tokens: int) -> Answer:
    assert all(event.WhichOneof("event") == "tokens" for event in events)
    outputs = [*first, *(output for event in events for output in event.tokens.outputs)]
    reasons = [convert.finish_reason_from_pb(event.tokens.finish_reason) for event in events]
    assert all(reason is None for reason in reasons[:-1]), "only the last message has a finish reason"
    return Answer(tuple(convert.output_from_pb(output) for output in outputs), reasons[-1], num_cached_tokens)
