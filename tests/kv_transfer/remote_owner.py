"""A worker in a process of its own, and a reader in this one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

import pytest
import torch

from cluster.errors import TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.peers import Peers
from cluster.kv_transfer.selection import PlaneContext, select_planes
from tests.kv_transfer.owner import CHECKPOINT, LARGE, SECRET
from tests.kv_transfer.owner_elsewhere import OwnerElsewhere
from tests.kv_transfer.planes import HOST, PlaneMaker
from tests.other_process import OtherProcess

NUM_BLOCKS = 128


class RemoteOwner:
    """The worker over there, and a reader here."""

    def __init__(self, plane: str, process: OtherProcess, ticket: KVTicket, device: str) -> None:
        self.process = process
        self.ticket = ticket
        self.pool = torch.zeros(NUM_BLOCKS, LARGE.block_bytes, dtype=torch.uint8, device=device)
        self.planes = select_planes(["shared_memory", "nixl", "grpc"], PlaneContext(self.pool, "the reader", HOST, SECRET))
        self.planes.append(PlaneMaker(SECRET).make("nccl", self.pool, "the reader"))
        self.peers = Peers(self.planes, layout=LARGE, checkpoint=CHECKPOINT, secret=SECRET)
        self.plane = plane

    @classmethod
    async def start(cls, plane: str, device: str = "cpu", environment: Mapping[str, str] | None = None) -> RemoteOwner:
        """
        Args:
            plane: that it publishes its pool on.
            device: of torch, on which both pools lie.
            environment: of the process, beside ours.
        """
        process = OtherProcess()
        owner = OwnerElsewhere(process, plane, layout=LARGE, num_blocks=NUM_BLOCKS, device=device, environment=environment)
        await owner.start()
        return cls(plane, process, owner.lease(range(NUM_BLOCKS - 1, -1, -1)), device)

    async def check_stop_ends_a_read(self, monkeypatch: pytest.MonkeyPatch, stall_limit: str) -> None:
        """A read of one that stops fails when `stall_limit` (dotted name, here made a second) is over, and writes nothing afterwards."""
        await self.read()
        peer = await self.peers.get(self.ticket)
        self.pool.zero_()
        with monkeypatch.context() as patch:
            patch.setattr(stall_limit, 1.0)
            self.process.signal(signal.SIGSTOP)
            async with asyncio.timeout(20):
                with pytest.raises(TransferError):
                    await self.read()
            assert peer.connection.closed
        await self._check_going_on_writes_nothing()

    async def check_stop_holds_no_cancelled_read(self, limit_s: float) -> None:
        """A cancelled read of one that stops ends within `limit_s`, and writes nothing afterwards."""
        await self.read()
        self.process.signal(signal.SIGSTOP)
        reading = asyncio.create_task(self.read())
        await asyncio.sleep(0.1)
        reading.cancel()
        async with asyncio.timeout(limit_s):
            with pytest.raises(asyncio.CancelledError):
                await reading
        await self._check_going_on_writes_nothing()

    async def _check_going_on_writes_nothing(self) -> None:
        """After a read that ended while it was stopped."""
        self.pool.fill_(7)
        self.process.signal(signal.SIGCONT)
        await self.read_into(torch.zeros_like(self.pool))  # anew; what was still on its way comes before this
        assert bool((self.pool == 7).all())

    async def read(self) -> None:
        await self.read_into(self.pool)

    async def read_into(self, pool: torch.Tensor) -> None:
        everything = range(NUM_BLOCKS)
        peer = await self.peers.get(self.ticket)
        assert peer.plane == self.plane
        await peer.read(self.ticket, everything, pool, everything)

    async def check_nothing_is_written_any_more(self) -> None:
        """Once all reads of the pool have ended: not even while other bytes arrive by the same plane."""
        self.pool.fill_(7)
        other = await RemoteOwner.start(self.plane)
        try:
            peer = await self.peers.get(other.ticket)
            await peer.read(other.ticket, range(NUM_BLOCKS), torch.zeros_like(self.pool), range(NUM_BLOCKS))
        finally:
            await other.close()
        assert bool((self.pool == 7).all())

    async def close(self) -> None:
        self.process.kill()
        self.process.close()
        await self.peers.close()
        for plane in self.planes:
            await plane.close()
