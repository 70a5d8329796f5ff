"""A prefill worker without an engine: a pool of known bytes, leases, a KV service."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence

import torch

from cluster import rpc
from cluster.errors import TicketMismatch, TicketStale
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer.base import Progress
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.kv_transfer.selection import find_nccl, publish
from cluster.kv_transfer.service import KVService
from cluster.types import TokenOutput
from tests.kv_transfer.planes import PlaneMaker
from tests.kv_transfer.process_state import Held

SECRET = "a secret of the tests"
CHECKPOINT = "checkpoint"
SMALL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, kv_dtype="float32")  # 4 KiB a block
LARGE = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32, kv_dtype="bf16")  # 720 KiB a block, as SmolLM2


def random_pool(pool: torch.Tensor, seed: int) -> None:
    """Fills `pool` with bytes that `seed` determines, none of them zero."""
    pool.copy_(torch.randint(1, 256, pool.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


class Leases:
    """A `TicketChecker` with leases that end when they are told to."""

    def __init__(self) -> None:
        self.live: dict[str, bytes] = {}
        self.digests: dict[str, bytes] = {}
        self.taken: dict[str, str] = {}
        self.num_checks = 0
        self.progress: asyncio.Queue[Progress] = asyncio.Queue()

    def check(self, ticket: KVTicket, num_blocks: int) -> None:
        self.num_checks += 1
        if self.live.get(ticket.key) != ticket.nonce:
            raise TicketStale(f"the lease of {ticket.key} is over")

    async def follow(self, key: str, nonce: bytes) -> AsyncGenerator[Progress, None]:
        while self.live.get(key) == nonce:
            progress = await self.progress.get()
            yield progress
            if progress.ticket is not None:
                return
        raise TicketStale(f"the lease of {key} is over")

    def renew(self, key: str, nonce: bytes) -> float | None:
        return 30.0 if self.live.get(key) == nonce else None

    def release(self, key: str, nonce: bytes, digest: bytes, taker: str) -> bool:
        if self.live.get(key) == nonce:
            if digest != self.digests[key]:
                raise TicketMismatch("another ticket", param="ticket")
            del self.live[key]
            self.taken[key] = taker
        return self.taken.get(key) == taker


class Owner:
    """One life of such a worker."""

    def __init__(
        self, plane: str, *, layout: KVLayout = SMALL, num_blocks: int = 64, maker: PlaneMaker | None = None, device: str = "cpu"
    ) -> None:
        self.layout = layout
        self.incarnation = secrets.token_hex(8)
        self.leases = Leases()
        self.memory = PoolMemory()
        self.pool = self.memory.allocate(num_blocks * layout.block_bytes).view(num_blocks, layout.block_bytes)
        random_pool(self.pool, seed=1)
        self.pool = self.pool.to(device)
        self.plane = (maker or PlaneMaker(SECRET)).make(plane, self.pool, self.incarnation, self.memory)
        self.endpoint = ""
        self.server = rpc.server(SECRET)

    async def start(self, port: int = 0) -> None:
        planes = await publish([self.plane])
        service = KVService(
            incarnation=self.incarnation,
            layout=self.layout,
            checkpoint=CHECKPOINT,
            domain="domain",
            pool=self.pool,
            planes=planes,
            checker=self.leases,
            nccl=find_nccl([self.plane]),
        )
        service.register(self.server)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self.server.start()

    def lease(self, block_ids: Sequence[int], *, num_tokens: int | None = None) -> KVTicket:
        """A ticket for `block_ids` that is good until it is taken or `leases.live` loses it."""
        ticket = KVTicket(
            request_id=secrets.token_hex(4),
            attempt=0,
            nonce=secrets.token_bytes(16),
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            blocks=tuple(BlockRef(block_id, 1) for block_id in block_ids),
            num_tokens=len(block_ids) * self.layout.block_size if num_tokens is None else num_tokens,
            layout=self.layout,
            checkpoint=CHECKPOINT,
            domain="domain",
            lease_s=30.0,
            first_token=TokenOutput(7, -0.5),
        )
        self.leases.live[ticket.key] = ticket.nonce
        self.leases.digests[ticket.key] = ticket.digest()
        return ticket

    def end_leases(self) -> None:
        """As when their time is up."""
        self.leases.live.clear()

    def zero(self, block_id: int, start: int) -> None:
        """Zeroes the bytes of a block from `start` on, as the tail of a partial block."""
        self.pool[block_id, start:] = 0

    def held(self) -> Held:
        """What the process that it lives in holds."""
        return Held.now()

    async def close(self) -> None:
        await self.plane.close()
        self.memory.close()
        await self.server.stop(None)
