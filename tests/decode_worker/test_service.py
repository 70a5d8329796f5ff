"""The Decode service over a real gRPC server, with a real intake between a fake engine and a fake peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry, generate_latest

from cluster import convert, rpc, wire
from cluster.engine.events import Allocated, Computed, EngineEvent, Failed, Token
from cluster.errors import BatonError, InternalError, TicketMismatch, TicketStale, WorkerRefusal
from cluster.kv_ticket import KVTicket
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import DecodeStub, add_DecodeServicer_to_server
from cluster.types import FinishReason, Request, TokenOutput
from cluster.worker.calls import LiveCalls
from cluster.worker.endpoint import Endpoint
from cluster.worker.gate import Gate
from decode_worker.metrics import TransferMetrics
from decode_worker.service import DecodeService
from tests.decode_worker import fakes
from tests.decode_worker.fakes import LAYOUT, request, ticket


def token(token_id: int, reason: FinishReason | None = None) -> Token:
    return Token(TokenOutput(token_id, -1.0), reason, time.monotonic())


class Bench(fakes.Bench):
    def __init__(self, *, may_prefill: bool) -> None:
        super().__init__()
        self.endpoint = Endpoint("127.0.0.1", "secret")
        self.registry = CollectorRegistry()
        self.calls = LiveCalls(Gate("me"), on_end=lambda: None)
        metrics = TransferMetrics(self.registry)
        service = DecodeService(self.engine, self.intake, self.calls, metrics, may_prefill=may_prefill)
        self.endpoint.add(lambda server: add_DecodeServicer_to_server(service, server))
        self.channel = rpc.channel(self.endpoint.address)

    def call(self, given: KVTicket | bytes = b"", of: Request | None = None) -> Any:
        data = given if isinstance(given, bytes) else wire.encode(given)
        header = pb.Header(incarnation="me", router_epoch=1)
        message = pb.DecodeRequest(header=header, request=convert.request_to_pb(of or request()), ticket=data)
        return DecodeStub(self.channel).Decode(message, metadata=rpc.secret_metadata("secret"), timeout=20)

    def metrics(self) -> str:
        return generate_latest(self.registry).decode()


@asynccontextmanager
async def serving(*, may_prefill: bool = False) -> AsyncIterator[Bench]:
    bench = Bench(may_prefill=may_prefill)
    await bench.endpoint.start()
    try:
        yield bench
    finally:
        await bench.channel.close(None)
        await bench.endpoint.close()


async def events_of(stream: Any) -> list[pb.DecodeEvent]:
    return [event async for event in stream]


async def error_of(stream: Any) -> BatonError:
    with pytest.raises(aio.AioRpcError) as error:
        while await stream.read() is not aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            pass
    return rpc.error_of(error.value)


async def test_a_ticket_is_taken_and_tokens_follow() -> None:
    async with serving() as bench:
        bench.engine.events = [[token(1)], [token(2), token(3)], [token(4, FinishReason.LENGTH)]]
        taken, *tokens = await events_of(bench.call(ticket()))
        assert (taken.taken.plane, taken.taken.num_bytes) == ("fake", 3 * LAYOUT.block_bytes)
        assert [[output.token_id for output in event.tokens.outputs] for event in tokens] == [[1], [2, 3], [4]]
        assert [convert.finish_reason_from_pb(event.tokens.finish_reason) for event in tokens] == [None, None, FinishReason.LENGTH]
        assert bench.log == ["reserve", "connect", "read", "read ended", "release", "decode"]
        assert 'baton_transfer_seconds_count{plane="fake"} 1.0' in bench.metrics()
        assert f'baton_transfer_bytes_total{{plane="fake"}} {3 * LAYOUT.block_bytes:.1f}' in bench.metrics()


async def test_only_the_first_tokens_say_where_the_time_went() -> None:
    async with serving() as bench:
        now_s = time.monotonic()
        bench.engine.events = [[Token(TokenOutput(1), None, now_s + 100)], [token(2, FinishReason.STOP)]]
        _, first, second = await events_of(bench.call(ticket()))
        assert 99 < first.tokens.decode_wait_s < 101
        assert first.tokens.step_s != 0
        assert (second.tokens.decode_wait_s, second.tokens.step_s) == (0, 0)


async def test_no_room_is_declined_and_nothing_else_happens() -> None:
    async with serving() as bench:
        bench.engine.has_room = False
        (event,) = await events_of(bench.call(ticket()))
        assert event.WhichOneof("event") == "declined"
        assert event.declined.reason and event.declined.retry_after_s > 0
        assert bench.log == ["reserve"]
        assert "baton_transfers_declined_total 1.0" in bench.metrics()


@pytest.mark.parametrize(
    ("given", "seen", "param"),
    [
        (b"\xc1 not a ticket", TicketMismatch, "ticket"),
        (wire.encode(ticket(request_id="other")), TicketMismatch, "request_id"),
    ],
)
async def test_a_wrong_ticket_is_refused_by_name(given: bytes, seen: type[BatonError], param: str) -> None:
    async with serving() as bench:
        error = await error_of(bench.call(given))
        assert isinstance(error, seen) and error.param == param
        assert bench.log == []


async def test_a_stale_commit_reaches_the_caller_and_no_token_does() -> None:
    async with serving() as bench:
        bench.peer.is_valid = False
        bench.engine.events = [[token(1)]]
        assert isinstance(await error_of(bench.call(ticket())), TicketStale)
        assert "decode" not in bench.log and bench.log[-1] == "abort r/0"
        assert 'baton_transfer_failures_total{code="ticket_stale"} 1.0' in bench.metrics()


async def test_a_pure_decode_worker_does_not_prefill() -> None:
    async with serving() as bench:
        error = await error_of(bench.call())
        assert isinstance(error, WorkerRefusal) and error.param == "ticket"
        assert bench.log == []


async def test_a_colocated_worker_prefills_and_sends_the_first_token_too() -> None:
    async with serving(may_prefill=True) as bench:
        allocated = Allocated((), 8, time.monotonic())
        script: list[list[EngineEvent]] = [[allocated, Computed(10), token(1)], [token(2, FinishReason.STOP)]]
        bench.engine.events = script
        prefilled, first, second = await events_of(bench.call())
        assert prefilled.prefilled.num_cached_tokens == 8
        assert prefilled.prefilled.prefill_s >= 0
        assert [output.token_id for event in (first, second) for output in event.tokens.outputs] == [1, 2]
        assert first.tokens.step_s == 0
        assert second.tokens.step_s > 0, "promise P5 holds for one worker too"
        assert second.tokens.finish_reason == pb.FINISH_REASON_STOP
        assert bench.log == ["generate"]


async def test_an_engine_that_fails_sends_what_it_had_and_then_the_error() -> None:
    async with serving() as bench:
        bench.engine.events = [[token(1), Failed("the step failed")]]
        stream = bench.call(ticket())
        assert (await stream.read()).WhichOneof("event") == "taken"
        assert [output.token_id for output in (await stream.read()).tokens.outputs] == [1]
        error = await error_of(stream)
        assert type(error) is InternalError and "step failed" in error.message


@pytest.mark.parametrize("where", ["before_read", "before_release"])
async def test_a_cancel_during_the_intake_frees(where: str) -> None:
    async with serving() as bench:
        gate = fakes.Gate()
        setattr(bench.peer, where, gate)
        stream = bench.call(ticket())
        await asyncio.wait_for(gate.reached.wait(), 5)
        stream.cancel()
        await asyncio.wait_for(bench.calls.wait_idle(), 5)
        assert bench.log[-1] == "abort r/0" and "decode" not in bench.log


async def test_a_cancel_while_decoding_closes_the_engines_stream() -> None:
    async with serving() as bench:
        gate = fakes.Gate()
        bench.engine.events = [[token(1)]]
        bench.engine.after_events = gate
        stream = bench.call(ticket())
        await stream.read()
        await stream.read()
        await asyncio.wait_for(gate.reached.wait(), 5)
        stream.cancel()
        await asyncio.wait_for(bench.calls.wait_idle(), 5)
        assert bench.log[-1] == "closed early"
