"""The plane between engines of one process: no sockets, no copies but the one. For tests and for benchmarks of everything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription, check_block_bytes, source_rows
from cluster.kv_transfer.block_copier import BlockCopier


class Exchange:
    """Where the planes of one process find each other: incarnation → pool."""

    def __init__(self) -> None:
        self.pools: dict[str, torch.Tensor] = {}


class InProcessPlane(DataPlane):
    """`pool` is uint8 `[num_blocks, block_bytes]`."""

    name = "in_process"

    def __init__(self, pool: torch.Tensor, exchange: Exchange, incarnation: str) -> None:
        self._pool = pool
        self._exchange = exchange
        self._incarnation = incarnation
        self._copier = BlockCopier()

    async def publish(self) -> bytes:
        self._exchange.pools[self._incarnation] = self._pool
        return b""

    async def connect(self, peer: PeerDescription) -> Connection:
        pool = self._exchange.pools.get(peer.incarnation)
        if pool is None:
            raise PlaneUnavailable(f"no worker {peer.incarnation} in this process")
        check_block_bytes(pool.shape[1], peer)
        return _Reference(self._exchange, peer.incarnation, self._copier)

    async def close(self) -> None:
        self._exchange.pools.pop(self._incarnation, None)
        self._copier.close()


class _Reference(Connection):
    """Looks the pool up at each read, so that it is gone when its owner is."""

    def __init__(self, exchange: Exchange, incarnation: str, copier: BlockCopier) -> None:
        self._exchange: Exchange | None = exchange
        self._incarnation = incarnation
        self._copier = copier

    @property
    def closed(self) -> bool:
        return self._exchange is None or self._incarnation not in self._exchange.pools

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        if self._exchange is None or self.closed:
            raise TransferError("the peer's pool is gone")
        pool = self._exchange.pools[self._incarnation]
        await self._copier.copy(pool, source_rows(ticket, indexes, pool.shape[0]), destination, block_ids)
        if self.closed:
            raise TransferError("the peer went away while its pool was read")

    async def close(self) -> None:
        self._exchange = None
