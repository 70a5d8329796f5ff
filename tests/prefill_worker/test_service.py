"""The Prefill service over a real gRPC server, around an engine that does as the test says."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from grpc import aio
from prometheus_client import CollectorRegistry, generate_latest

from cluster import convert, rpc, wire
from cluster.config import TransferConfig
from cluster.engine.events import Allocated, Computed, EngineEvent, Failed, Token
from cluster.errors import BatonError, ContextTooLong, Draining, InternalError, TicketStale
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import PrefillStub, add_PrefillServicer_to_server
from cluster.types import FinishReason, OrderKey, Request, SamplingParams, TokenOutput
from cluster.worker.calls import LiveCalls
from cluster.worker.endpoint import Endpoint
from cluster.worker.gate import Gate
from prefill_worker.issuer import TicketIssuer
from prefill_worker.metrics import LeaseMetrics
from prefill_worker.outbox import Outbox
from prefill_worker.service import PrefillService

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, kv_dtype="bf16")
REQUEST = Request("r", 2, tuple(range(10)), SamplingParams(max_tokens=8, seed=1), OrderKey(0.0, 0))
FIRST = TokenOutput(9, -0.25, ((9, -0.25), (1, -2.0)))
ALLOCATED = Allocated((BlockRef(1, 4), BlockRef(0, 2), BlockRef(2, 2)), 4, 0.0)
SCRIPT: list[list[EngineEvent]] = [
    [ALLOCATED, Computed(6)],
    [Computed(8), Computed(10), Token(FIRST, None, 0.0)],
]


async def pass_on() -> None:
    """Between two batches of a script."""


class FakeEngine:
    """Plays a script of events; remembers aborts."""

    def __init__(self) -> None:
        self.script: list[list[EngineEvent]] = SCRIPT
        self.error: BatonError | None = None
        self.before_batch: Callable[[], Awaitable[None]] = pass_on
        self.closed_early = asyncio.Event()
        self.freed: list[str] = []

    async def prefill(self, request: Request) -> AsyncGenerator[list[EngineEvent], None]:
        assert request == REQUEST
        is_done = False
        try:
            if self.error is not None:
                raise self.error
            for batch in self.script:
                await self.before_batch()
                yield batch
            is_done = True
        finally:
            if not is_done:
                self.closed_early.set()


class Bench:
    def __init__(self, transfer: TransferConfig, checksums: bool) -> None:
        self.engine = FakeEngine()
        self.gate = Gate("me")
        self.endpoint = Endpoint("127.0.0.1", "secret")
        self.registry = CollectorRegistry()
        self.calls = LiveCalls(self.gate, on_end=lambda: None)
        self.outbox = Outbox(transfer, asyncio.get_running_loop(), self.engine.freed.append, LeaseMetrics(self.registry).count)
        issuer = TicketIssuer("me", self.endpoint.address, LAYOUT, "ckpt", "domain", transfer.lease_s)
        self.pool = torch.arange(4 * LAYOUT.block_bytes).to(torch.uint8).view(4, -1)
        service = PrefillService(self.engine, self.outbox, issuer, self.calls, self.pool if checksums else None)
        self.endpoint.add(lambda server: add_PrefillServicer_to_server(service, server))
        self.channel = rpc.channel(self.endpoint.address)

    def call(self) -> Any:
        message = pb.PrefillRequest(header=pb.Header(incarnation="me", router_epoch=1), request=convert.request_to_pb(REQUEST))
        return PrefillStub(self.channel).Prefill(message, metadata=rpc.secret_metadata("secret"), timeout=20)

    async def wait_idle(self) -> None:
        async with asyncio.timeout(5):
            await self.calls.wait_idle()
        assert len(self.outbox) == 0


@asynccontextmanager
async def serving(checksums: bool = False, **transfer: float) -> AsyncIterator[Bench]:
    bench = Bench(TransferConfig.model_validate(transfer), checksums)
    await bench.endpoint.start()
    try:
        yield bench
    finally:
        await bench.channel.close(None)
        await bench.endpoint.close()


async def read(stream: Any, number: int) -> list[pb.PrefillEvent]:
    return [await stream.read() for _ in range(number)]


async def error_of(stream: Any) -> BatonError:
    with pytest.raises(aio.AioRpcError) as error:
        while await stream.read() is not aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            pass
    return rpc.error_of(error.value)


async def test_the_stream_tells_the_whole_story_and_ends_with_the_commit() -> None:
    async with serving() as bench:
        stream = bench.call()
        offer, early, late, first = await read(stream, 4)
        assert offer.offer.num_cached_tokens == 4
        assert (early.ready.upto_token, late.ready.upto_token) == (6, 10), "marks that come together are one"
        assert convert.output_from_pb(first.first_token.output) == FIRST
        assert first.first_token.finish_reason == pb.FINISH_REASON_UNSPECIFIED

        offered, ticket = wire.decode(KVTicket, offer.offer.ticket), wire.decode(KVTicket, first.first_token.ticket)
        assert offered.first_token is None and ticket.first_token == FIRST
        assert (ticket.key, ticket.num_tokens, ticket.blocks) == (REQUEST.key, 10, ALLOCATED.blocks)
        assert (ticket.incarnation, ticket.endpoint) == ("me", bench.endpoint.address)
        assert (ticket.layout, ticket.checkpoint, ticket.domain) == (LAYOUT, "ckpt", "domain")
        assert len(ticket.nonce) == 16 and ticket.nonce == offered.nonce and ticket.checksums == ()

        bench.outbox.check(ticket, len(ticket.blocks))
        assert bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "taker")
        assert await stream.read() is aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
        await bench.wait_idle()
        assert bench.engine.freed == [REQUEST.key]
        assert not bench.engine.closed_early.is_set()
        assert b'baton_leases_total{end="taken"} 1.0' in generate_latest(bench.registry)


async def test_nonces_differ() -> None:
    async with serving() as bench:
        nonces = set()
        for _ in range(3):
            stream = bench.call()
            first = (await read(stream, 4))[3]
            nonces.add(wire.decode(KVTicket, first.first_token.ticket).nonce)
            stream.cancel()
            await bench.wait_idle()
        assert len(nonces) == 3


async def test_times_cover_the_call() -> None:
    async def slowly() -> None:
        await asyncio.sleep(0.05)

    async with serving() as bench:
        bench.engine.before_batch = slowly
        allocated = replace(ALLOCATED, at_s=time.monotonic() + 0.05)
        bench.engine.script = [[allocated, *SCRIPT[0][1:]], SCRIPT[1]]
        stream = bench.call()
        offer, *_, first = await read(stream, 4)
        assert 0.04 < offer.offer.wait_s < 0.3
        assert 0.04 < first.first_token.prefill_s < 0.3


async def test_checksums_are_of_the_prompts_blocks() -> None:
    async with serving(checksums=True) as bench:
        first = (await read(bench.call(), 4))[3]
        ticket = wire.decode(KVTicket, first.first_token.ticket)
        assert ticket.checksums == tuple(zlib.crc32(bench.pool[block].numpy().tobytes()) for block in (1, 0, 2))
        bench.outbox.check(ticket, len(ticket.blocks))


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_a_request_that_ends_at_its_first_token_leases_nothing(reason: FinishReason) -> None:
    async with serving() as bench:
        bench.engine.script = [[ALLOCATED], [Computed(10), Token(FIRST, reason, 0.0)]]
        stream = bench.call()
        _, _, first = await read(stream, 3)
        assert convert.finish_reason_from_pb(first.first_token.finish_reason) == reason
        assert first.first_token.ticket == b""
        assert await stream.read() is aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
        await bench.wait_idle()
        assert bench.engine.freed == [REQUEST.key]


async def test_a_lease_that_nobody_takes_ends_the_stream_as_stale() -> None:
    async with serving(lease_s=0.05, renew_interval_s=0.01) as bench:
        assert isinstance(await error_of(bench.call()), TicketStale)
        await bench.wait_idle()
        assert bench.engine.freed == [REQUEST.key]


@pytest.mark.parametrize("num_events", [0, 1, 2, 3, 4])
async def test_a_cancel_after_any_event_frees_once(num_events: int) -> None:
    async with serving() as bench:
        steps = asyncio.Semaphore(0)
        bench.engine.script = [[event] for batch in SCRIPT for event in batch if event != Computed(8)]
        bench.engine.before_batch = steps.acquire  # type: ignore[assignment]  # the result is of no interest
        stream = bench.call()
        for _ in range(num_events):
            steps.release()
            await stream.read()
        while len(bench.calls) == 0:  # noqa: ASYNC110  # before the first event there is nothing to wait for
            await asyncio.sleep(0.001)
        stream.cancel()
        await bench.wait_idle()
        assert bench.engine.freed == ([REQUEST.key] if num_events else [])
        assert bench.engine.closed_early.is_set() == (num_events < 4)


async def test_an_engine_that_fails_is_an_internal_error() -> None:
    async with serving() as bench:
        bench.engine.script = [[ALLOCATED], [Failed("the step failed")]]
        error = await error_of(bench.call())
        assert type(error) is InternalError and "step failed" in error.message
        await bench.wait_idle()
        assert bench.engine.freed == [REQUEST.key]


async def test_the_engines_refusal_reaches_the_caller() -> None:
    async with serving() as bench:
        bench.engine.error = ContextTooLong("too long", param="prompt")
        error = await error_of(bench.call())
        assert isinstance(error, ContextTooLong) and error.param == "prompt"
        await bench.wait_idle()


async def test_a_drain_that_runs_out_of_time_withdraws_the_lease() -> None:
    async with serving() as bench:
        stream = bench.call()
        first = (await read(stream, 4))[3]
        ticket = wire.decode(KVTicket, first.first_token.ticket)
        bench.gate.close()
        assert isinstance(await error_of(bench.call()), Draining), "no new work"
        bench.outbox.check(ticket, len(ticket.blocks))
        assert bench.outbox.renew(ticket.key, ticket.nonce), "leases live on while draining"
        bench.calls.abort()
        assert isinstance(await error_of(stream), Draining)
        await bench.wait_idle()
        assert not bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "taker")
        assert bench.engine.freed == [REQUEST.key]
