"""The plane for two workers on one host: the reader maps the owner's pool and copies out of it. One-sided: the owner does nothing.

    1. the owner's pool lies in a memfd (`PoolMemory`); `publish` seals it and opens the socket that hands it out (`FdServer`)
    2. `connect` asks that socket: whoever gets the descriptor and finds the token in its mapping is on the same host
    3. reads are memory copies
    4. the end of the socket is the end of the owner's life: the mapping goes at once, or with the last copy that is using it

Nothing has a name in the file system, so a kill -9 of either side leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cluster import wire
from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription, check_block_bytes, described_pool, source_rows
from cluster.kv_transfer.block_copier import BlockCopier
from cluster.kv_transfer.fd_server import FdServer, receive_fd
from cluster.kv_transfer.pool_memory import PoolMemory, map_pool


@dataclass(frozen=True, slots=True)
class PoolDescriptor:
    """What a reader needs to map a pool."""

    socket: str  # name of the abstract Unix socket
    token: bytes
    num_blocks: int
    block_bytes: int


class SharedMemoryPlane(DataPlane):
    """`memory` is where the own pool was allocated; a worker that only reads has none."""

    name = "shared_memory"

    def __init__(self, pool: torch.Tensor, memory: PoolMemory | None = None) -> None:
        """`pool` is uint8 `[num_blocks, block_bytes]`, the whole of what `memory` allocated."""
        self._pool = pool
        self._memory = memory
        self._server: FdServer | None = None
        self._copier = BlockCopier()

    async def publish(self) -> bytes:
        if self._memory is None:
            raise PlaneUnavailable("the pool was not allocated in shared memory")
        assert self._pool.numel() == self._memory.num_bytes, "the pool is not what the memory holds"
        self._server = FdServer(self._memory.share(), self._memory.token)
        await self._server.start()
        num_blocks, block_bytes = self._pool.shape
        return wire.encode(PoolDescriptor(self._server.name, self._memory.token, num_blocks, block_bytes))

    async def connect(self, peer: PeerDescription) -> Connection:
        descriptor = described_pool(PoolDescriptor, self.name, peer)
        check_block_bytes(descriptor.block_bytes, peer)
        link, fd = await receive_fd(descriptor.socket, descriptor.token)
        try:
            mapped = map_pool(fd, descriptor.num_blocks * descriptor.block_bytes, descriptor.token)
        except BaseException:
            link.close()
            raise
        finally:
            os.close(fd)
        return _Mapping(link, mapped.view(descriptor.num_blocks, descriptor.block_bytes), self._copier)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        if self._memory is not None:
            self._memory.close()
        self._copier.close()


class _Mapping(Connection):
    """A peer's pool in our address space, for as long as the peer lives."""

    def __init__(self, link: socket.socket, pool: torch.Tensor, copier: BlockCopier) -> None:
        self._link = link
        self._pool: torch.Tensor | None = pool
        self._copier = copier
        asyncio.get_running_loop().add_reader(link, self._drop)  # readable without a word from the owner: it is gone

    @property
    def closed(self) -> bool:
        return self._pool is None

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        if self._pool is None:
            raise TransferError("the peer's shared memory is gone")
        rows = source_rows(ticket, indexes, self._pool.shape[0])
        # The copier keeps the mapping while it needs it; a reference here would live as long as the traceback of an error below.
        await self._copier.copy(self._pool, rows, destination, block_ids)
        if self.closed:
            raise TransferError("the peer went away while its shared memory was read")

    async def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if self._pool is None:
            return
        self._pool = None
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
