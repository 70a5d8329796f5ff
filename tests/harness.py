"""Real workers in the test's own process, and a raw gRPC client for them. No router, no gateway, no Ray.

async with Workers(tiny_model("llama")) as workers:
    prefill, decode = await workers.start_prefill(), await workers.start_decode()
    answer = await workers.client.disaggregated(prefill, decode, make_request([1, 2, 3]))
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from grpc import aio
from prometheus_client import CollectorRegistry

from cluster import convert, rpc, wire
from cluster.config import PoolConfig, TransferConfig
from cluster.engine.build import allocate_private, build_engine
from cluster.engine.engine import Engine
from cluster.errors import BatonError
from cluster.faults.injector import FaultInjector
from cluster.faults.points import FaultAction, FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import DecodeStub, PrefillStub
from cluster.types import FinishReason, OrderKey, ReportReply, Request, SamplingParams, TokenOutput, WorkerLoad, WorkerRole
from cluster.worker.identity import WorkerIdentity
from cluster.worker.settings import WorkerSettings
from cluster.worker.worker import Worker
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.kv_transfer.planes import PlaneMaker
from tests.tiny_models import VOCAB_SIZE

SECRET = "secret of the tests"
ROUTER_EPOCH = 1
_numbers = itertools.count()
W = TypeVar("W", bound=Worker)


def make_request(prompt: Sequence[int], *, request_id: str | None = None, attempt: int = 0, **sampling: Any) -> Request:
    """A request with its own id; greedy, 16 tokens, unless `sampling` says otherwise."""
    number = next(_numbers)
    params = SamplingParams(**{"max_tokens": 16, "seed": 1, "temperature": 0.0, "ignore_eos": True, **sampling})
    return Request(request_id or f"request-{number}", attempt, tuple(prompt), params, OrderKey(float(number), number))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """The same token ids each time."""
    return random.Random(f"{length}/{seed}").choices(range(4, VOCAB_SIZE), k=length)


def tiny_pool(**fields: Any) -> PoolConfig:
    """A pool config for tiny models: small blocks, small steps, so that prompts of a few tokens exercise everything."""
    defaults = {
        "scheme": "float32",
        "kv_dtype": "float32",
        "block_size": 8,
        "kv_cache_bytes": "2MiB",
        "swap_bytes": "1MiB",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "drain_timeout_s": 5,
    }
    return PoolConfig.model_validate({**defaults, **fields})


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


@dataclass
class Workers:
    """Starts workers of one model and ends them. Every worker has its own engine and endpoint."""

    folder: Path
    plane: str = "shared_memory"
    pool: PoolConfig = field(default_factory=tiny_pool)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    max_model_len: int | None = None
    faults: FaultInjectionConfig = field(default_factory=FaultInjectionConfig)
    reports: list[WorkerLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Client()
        self._planes = PlaneMaker(SECRET)
        self._reported = asyncio.Condition()
        self._started: list[Worker] = []
        self._num_threads = torch.get_num_threads()
        self._registries: list[CollectorRegistry] = []

    async def __aenter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for worker in reversed(self._started):
            await worker.close()
        torch.set_num_threads(self._num_threads)

    async def start_prefill(self, pool: PoolConfig | None = None) -> PrefillWorker:
        memory = PoolMemory() if self.plane == "shared_memory" else None
        allocate = allocate_private if memory is None else memory.allocate
        engine = build_engine(pool or self.pool, self.folder, max_model_len=self.max_model_len, allocate=allocate)
        settings = self._settings(WorkerRole.PREFILL, pool)
        return await self._start(
            PrefillWorker(settings, engine, [self._planes.make(self.plane, engine.kv_cache.storage, settings.identity.incarnation, memory)])
        )

    async def start_decode(self, pool: PoolConfig | None = None, role: WorkerRole = WorkerRole.DECODE) -> DecodeWorker:
        engine = build_engine(pool or self.pool, self.folder, max_model_len=self.max_model_len)
        settings = self._settings(role, pool)
        return await self._start(
            DecodeWorker(settings, engine, [self._planes.make(self.plane, engine.kv_cache.storage, settings.identity.incarnation)])
        )

    async def start_colocated(self, pool: PoolConfig | None = None) -> DecodeWorker:
        """One engine that does everything: the oracle of promise P1."""
        return await self.start_decode(pool, WorkerRole.COLOCATED)

    async def wait_for_report(self, is_it: Callable[[WorkerLoad], bool]) -> WorkerLoad:
        """The next report, from now on, for which `is_it` holds."""
        seen = len(self.reports)
        async with self._reported:
            await self._reported.wait_for(lambda: any(map(is_it, self.reports[seen:])))
        return next(filter(is_it, self.reports[seen:]))

    def num_injected(self, point: FaultPoint, action: FaultAction) -> int:
        """Faults that struck any worker."""
        labels = {"point": point.value, "action": action.value}
        return sum(int(found.get_sample_value("baton_injected_faults_total", labels) or 0) for found in self._registries)

    async def _start(self, worker: W) -> W:
        self._started.append(worker)
        await worker.start()
        return worker

    def _settings(self, role: WorkerRole, pool: PoolConfig | None) -> WorkerSettings:
        identity = WorkerIdentity.draw(f"{role}-{len(self._started)}", role, "node")
        registry = CollectorRegistry()
        self._registries.append(registry)
        faults = FaultInjector(self.faults, role=role, replica=len(self._started), registry=registry)
        return WorkerSettings(identity, pool or self.pool, self.transfer, SECRET, self._send, registry=registry, faults=faults)

    async def _send(self, report: bytes) -> bytes:
        async with self._reported:
            self.reports.append(wire.decode(WorkerLoad, report))
            self._reported.notify_all()
        return wire.encode(ReportReply(ROUTER_EPOCH))


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


async def error_of(call: Any) -> BatonError:
    """The error that ends a call; reads away what comes before."""
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as failure:
        return rpc.error_of(failure)
    raise AssertionError("the call ended well")


async def check_books(*workers: Worker) -> None:
    """Waits until nothing is being served, then: every block has one owner, and none is owned or leased."""
    for worker in workers:
        await worker.calls.wait_idle()
    for worker in workers:
        load = await worker.engine_loop.run(_checked_load)
        assert (load.num_blocks_owned, load.num_blocks_leased, load.live_keys) == (0, 0, ()), load
        if isinstance(worker, PrefillWorker):
            assert len(worker.outbox) == 0


def _checked_load(engine: Engine) -> Any:
    engine.check_integrity()
    return engine.load()
