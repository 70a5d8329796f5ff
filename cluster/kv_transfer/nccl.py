"""The plane of NCCL, by cupy: from one device's memory into another's. Two-sided: the owner sends what the reader asks for.

    1. `publish` says which NCCL the owner has; nothing is registered, since NCCL sends from any device memory
    2. `connect` makes a communicator of two ranks for the pair: the reader opens a `KV.Nccl` call, the owner draws a name (ncclUniqueId),
       both join, and the owner's token comes over it, so a pair that cannot is told here and not at its first handoff
    3. a read is a few groups. For each the reader asks in the call, the owner checks the ticket and answers, and both post the sends and
       receives of all its blocks at once, on streams of their own. These do not wait for the engine's: a ticket may be read, and blocks are
       reserved for a read, only once the device has done what the engine wanted with them
    4. communicator and call live and end together: whatever breaks one ends both, on both sides (ncclCommAbort), within seconds, and the
       next `connect` makes others. A restarted peer has another incarnation, so it is another pair

The plane has been tested with a device that keeps NCCL's rules over sockets (`tests/kv_transfer/socket_device.py`). What asks for a device
(`nccl_library`, `tests/gpu`) has not run yet: we had none.

NCCL's ports ask for no secret but a number drawn for each communicator: with a host that is not loopback keep them in a network that you
trust (NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from cluster import wire
from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription, TicketChecker, check_block_bytes, described_pool
from cluster.kv_transfer.nccl_device import TOKEN_BYTES, Device, NcclPool
from cluster.kv_transfer.nccl_link import NcclLink, Reader
from cluster.kv_transfer.nccl_owner import NcclCall, NcclOwner


class NcclPlane(DataPlane):
    """Reads and is read by NCCL."""

    name = "nccl"

    def __init__(self, pool: torch.Tensor, incarnation: str, secret: str, open_device: Callable[[], Device]) -> None:
        """
        Args:
            pool: ours, uint8 `[num_blocks, block_bytes]`.
            incarnation: of this worker.
            secret: of the cluster.
            open_device: finds the device that `pool` lies on; raises PlaneUnavailable. Called once it is needed, off the event loop.
        """
        self._pool = pool
        self._incarnation = incarnation
        self._secret = secret
        self._open_device = open_device
        self._reader: Reader | None = None
        self._opening = asyncio.Lock()
        self._owner: NcclOwner | None = None

    async def publish(self) -> bytes:
        self._owner = NcclOwner((await self._open()).device, self._pool, self._incarnation)
        return wire.encode(self._owner.description)

    async def serve(self, call: NcclCall, checker: TicketChecker) -> None:
        """Serves one `KV.Nccl` call: see `NcclOwner.serve`.

        Raises:
            PlaneUnavailable: our pool is not published.
        """
        if self._owner is None:
            raise PlaneUnavailable("this worker's pool cannot be read by NCCL")
        await self._owner.serve(call, checker)

    async def connect(self, peer: PeerDescription) -> Connection:
        source = described_pool(NcclPool, self.name, peer)
        check_block_bytes(source.block_bytes, peer)
        reader = await self._open()
        if source.version != reader.device.version:
            raise PlaneUnavailable(f"the peer has NCCL {source.version}, this worker {reader.device.version}")
        link = NcclLink(reader, peer, source)
        try:
            await link.open()
        except TransferError as error:
            await link.close()
            raise PlaneUnavailable(f"no communicator with the peer: {error}") from error
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()

    async def _open(self) -> Reader:
        async with self._opening:
            if self._reader is None:
                self._reader = await asyncio.to_thread(self._make_reader)
            return self._reader

    def _make_reader(self) -> Reader:
        device, memory = self._open_device(), self._pool.device
        # Brought from the host, it is there when this returns: NCCL's streams do not wait for torch's.
        token = torch.zeros(1, TOKEN_BYTES, dtype=torch.uint8).to(memory)
        return Reader(device, memory, self._secret, token, asyncio.Lock())
