"""A worker in another process, and a reader in this one."""

from __future__ import annotations

import asyncio
import sys

import torch

from cluster import wire
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.peers import Peers
from cluster.kv_transfer.selection import PlaneContext, select_planes
from tests.kv_transfer.owner import CHECKPOINT, LARGE, SECRET
from tests.kv_transfer.planes import HOST

NUM_BLOCKS = 128  # as the script's


class RemoteOwner:
    """The script in its process, and a reader here."""

    def __init__(self, plane: str, process: asyncio.subprocess.Process, ticket: KVTicket) -> None:
        self.process = process
        self.ticket = ticket
        self.pool = torch.zeros(NUM_BLOCKS, LARGE.block_bytes, dtype=torch.uint8)
        self.planes = select_planes(["shared_memory", "nixl", "grpc"], PlaneContext(self.pool, "the reader", HOST, SECRET))
        self.peers = Peers(self.planes, layout=LARGE, checkpoint=CHECKPOINT, secret=SECRET)
        self.plane = plane

    @classmethod
    async def start(cls, plane: str) -> RemoteOwner:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.kv_transfer.owner", plane, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        return cls(plane, process, wire.decode(KVTicket, bytes.fromhex(line.decode())))

    async def read(self) -> None:
        await self.read_into(self.pool)

    async def read_into(self, pool: torch.Tensor) -> None:
        everything = range(NUM_BLOCKS)
        peer = await self.peers.get(self.ticket)
        assert peer.plane == self.plane
        await peer.read(self.ticket, everything, pool, everything)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        await self.kill()
        await self.peers.close()
        for plane in self.planes:
            await plane.close()
