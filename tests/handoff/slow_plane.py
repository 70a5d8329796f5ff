"""A one-sided data plane whose copies take as long as the test likes: each block is written in two halves, and the test says when.

It keeps the promise of `Connection.read` as the real planes do, by `outlast`: a copy that has begun is waited for, however the read ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription, check_block_bytes, source_rows
from cluster.kv_transfer.outlast import outlast

NAME = "slow"


@dataclass(eq=False)
class Copy:
    """One block on its way, read whenever it is written: its owner knows nothing of it."""

    reader: str  # incarnation
    key: str  # of the ticket
    source: torch.Tensor  # uint8 [block_bytes], in the owner's pool
    destination: torch.Tensor  # likewise, in the reader's
    block: BlockRef  # the destination, when the copy was asked for
    end: asyncio.Future[None]
    has_begun: bool = False
    is_unwanted: bool = False

    def skip(self) -> None:
        self.is_unwanted = True

    def advance(self) -> None:
        """Begins, unless nobody wants it any more; then writes the rest."""
        half = len(self.source) // 2
        if not self.has_begun and not self.is_unwanted:
            self.has_begun = True
            self.destination[:half] = self.source[:half]
            return
        if self.has_begun:
            self.destination[half:] = self.source[half:]
        if not self.end.done():
            self.end.set_result(None)


@dataclass
class SlowCopies:
    """All pools of the test's workers and the copies between them that have not ended."""

    pools: dict[str, torch.Tensor] = field(default_factory=dict)  # by incarnation
    pending: list[Copy] = field(default_factory=list)

    def advance(self, copy: Copy) -> None:
        copy.advance()
        if copy.end.done():
            self.pending.remove(copy)


class SlowPlane(DataPlane):
    """`pool` is uint8 `[num_blocks, block_bytes]`."""

    name = NAME

    def __init__(self, pool: torch.Tensor, incarnation: str, copies: SlowCopies, generation: Callable[[int], int]) -> None:
        """`generation`: how often a block of `pool` has been given out."""
        self._pool = pool
        self._incarnation = incarnation
        self._copies = copies
        self._generation = generation

    async def publish(self) -> bytes:
        self._copies.pools[self._incarnation] = self._pool
        return b""

    async def connect(self, peer: PeerDescription) -> Connection:
        pool = self._copies.pools.get(peer.incarnation)
        if pool is None:
            raise PlaneUnavailable(f"no worker {peer.incarnation} in this process")
        check_block_bytes(pool.shape[1], peer)
        return _Mapping(self._copies, peer.incarnation, self._incarnation, self._generation)

    async def close(self) -> None:
        self._copies.pools.pop(self._incarnation, None)


class _Mapping(Connection):
    def __init__(self, copies: SlowCopies, owner: str, reader: str, generation: Callable[[int], int]) -> None:
        self._copies = copies
        self._owner = owner
        self._reader = reader
        self._generation = generation
        self._is_closed = False

    @property
    def closed(self) -> bool:
        return self._is_closed or self._owner not in self._copies.pools

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        self._check_open()
        pool = self._copies.pools[self._owner]
        for row, block_id in zip(source_rows(ticket, indexes, pool.shape[0]), block_ids, strict=True):
            self._check_open()
            end = asyncio.get_running_loop().create_future()
            block = BlockRef(block_id, self._generation(block_id))
            copy = Copy(self._reader, ticket.key, pool[row], destination[block_id], block, end)
            self._copies.pending.append(copy)
            await outlast(end, copy.skip)
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise TransferError("the peer's pool is gone")

    async def close(self) -> None:
        self._is_closed = True
