"""A decode worker's surroundings, with a switch for everything that can go wrong."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cluster.config import TransferConfig
from cluster.engine.engine import Reservation
from cluster.engine.events import EngineEvent
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer.base import Progress
from cluster.types import OrderKey, Request, SamplingParams, TokenOutput
from decode_worker.block_reader import Destination
from decode_worker.intake import Intake

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, kv_dtype="bf16")
NUM_TOKENS = 10  # two full blocks and half of a third
FIRST_TOKEN = TokenOutput(7, -0.5)


def request(**fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=8, seed=1)
    return replace(Request("r", 0, tuple(range(NUM_TOKENS)), sampling, OrderKey(0.0, 0)), **fields)


def ticket(**fields: Any) -> KVTicket:
    blocks = (BlockRef(2, 1), BlockRef(0, 3), BlockRef(1, 1))
    whole = KVTicket("r", 0, b"n" * 16, "peer", "host:1", blocks, NUM_TOKENS, LAYOUT, "ckpt", "peer-domain", 30.0, FIRST_TOKEN)
    return replace(whole, **fields)


async def nothing() -> None:
    """Happens between two steps of a fake when a test has not put anything there."""


@dataclass
class FakeEngine:
    """Reserves once; remembers what was freed, and when."""

    log: list[str]
    num_cached_blocks: int = 0
    num_tokens: int = NUM_TOKENS
    block_ids: tuple[int, ...] = (5, 3, 4)
    domain: str = "peer-domain"
    has_room: bool = True
    before_reserve: Callable[[], Awaitable[None]] = nothing
    events: list[list[EngineEvent]] = field(default_factory=list)
    after_events: Callable[[], Awaitable[None]] = nothing

    async def reserve(self, request: Request, ticket_domain: str, num_tokens: int) -> Reservation | None:
        assert (ticket_domain, num_tokens) == (self.domain, self.num_tokens)
        self.log.append("reserve")
        await self.before_reserve()
        return Reservation(request.key, self.block_ids, self.num_cached_blocks) if self.has_room else None

    def abort(self, key: str) -> None:
        self.log.append(f"abort {key}")

    async def decode(self, reservation: Reservation, first_token: TokenOutput) -> AsyncGenerator[list[EngineEvent], None]:
        assert first_token == FIRST_TOKEN
        self.log.append("decode")
        async for batch in self._play():
            yield batch

    async def generate(self, request: Request) -> AsyncGenerator[list[EngineEvent], None]:
        self.log.append("generate")
        async for batch in self._play():
            yield batch

    async def _play(self) -> AsyncGenerator[list[EngineEvent], None]:
        try:
            for batch in self.events:
                yield batch
            await self.after_events()
        except (asyncio.CancelledError, GeneratorExit):
            self.log.append("closed early")
            raise


@dataclass
class FakePeer:
    """A prefill worker's pool and leases."""

    log: list[str]
    pool: torch.Tensor
    plane: str = "fake"
    is_valid: bool = True
    lease_s: float | None = 30.0
    before_read: Callable[[], Awaitable[None]] = nothing
    after_read: Callable[[], Awaitable[None]] = nothing
    before_release: Callable[[], Awaitable[None]] = nothing
    before_renew: Callable[[], Awaitable[None]] = nothing
    progress: asyncio.Queue[Progress | BaseException | None] = field(default_factory=asyncio.Queue)  # None ends the stream
    indexes: list[int] = field(default_factory=list)
    takers: set[str] = field(default_factory=set)

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        self.log.append("read")
        self.indexes = list(indexes)
        await self.before_read()
        for index, block_id in zip(indexes, block_ids, strict=True):
            destination[block_id] = self.pool[ticket.blocks[index].block_id]
        await self.after_read()
        self.log.append("read ended")

    async def follow(self, ticket: KVTicket) -> AsyncGenerator[Progress, None]:
        self.log.append("follow")
        while True:
            progress = await self.progress.get()
            if isinstance(progress, BaseException):
                raise progress
            if progress is None:
                return
            yield progress

    async def renew(self, ticket: KVTicket) -> float | None:
        self.log.append("renew")
        await self.before_renew()
        return self.lease_s

    async def release(self, ticket: KVTicket, taker: str) -> bool:
        assert taker.startswith("me/")
        self.takers.add(taker)
        self.log.append("release")
        await self.before_release()
        return self.is_valid


class Bench:
    """An intake between a fake engine and a fake peer."""

    def __init__(self, renew_interval_s: float = 60.0, *, checksums: bool = True) -> None:
        self.log: list[str] = []
        self.engine = FakeEngine(self.log)
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(0, 256, (3, LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)
        self.peer = FakePeer(self.log, random)
        self.pool = torch.zeros(6, LAYOUT.block_bytes, dtype=torch.uint8)
        self.tails: list[tuple[int, int]] = []
        self.before_connect: Callable[[], Awaitable[None]] = nothing
        destination = Destination(self.pool, LAYOUT, "ckpt", "me", lambda block_id, from_token: self.tails.append((block_id, from_token)))
        transfer = TransferConfig(renew_interval_s=renew_interval_s, lease_s=120.0, checksums=checksums)
        self.intake = Intake(self.engine, destination, self._peer_of, transfer)

    async def _peer_of(self, _ticket: KVTicket) -> FakePeer:
        self.log.append("connect")
        await self.before_connect()
        return self.peer

    def checksums(self) -> tuple[int, ...]:
        return tuple(zlib.crc32(self.peer.pool[ref.block_id].numpy().tobytes()) for ref in ticket().blocks)


class Gate:
    """Holds a fake where it is until the test says so."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.open.wait()
