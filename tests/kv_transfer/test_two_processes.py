"""Reads from a worker in another process, and what is left when that process is killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
import torch

from cluster import wire
from cluster.errors import TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.peers import Peers
from cluster.kv_transfer.selection import select_planes
from cluster.kv_transfer.shared_memory import PoolDescriptor
from cluster.process_state import ProcessState
from tests.kv_transfer.owner import CHECKPOINT, LARGE, SECRET, random_pool
from tests.kv_transfer.process_state import Held, eventually, num_pool_mappings, open_files, shm_files, socket_exists

NUM_BLOCKS = 128  # as the script's


class RemoteOwner:
    """The script in its process, and a reader here."""

    def __init__(self, plane: str, process: asyncio.subprocess.Process, ticket: KVTicket) -> None:
        self.process = process
        self.ticket = ticket
        self.pool = torch.zeros(NUM_BLOCKS, LARGE.block_bytes, dtype=torch.uint8)
        self.planes = select_planes(["shared_memory", "grpc"], self.pool, secret=SECRET)
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
        everything = range(NUM_BLOCKS)
        peer = await self.peers.get(self.ticket)
        assert peer.plane == self.plane
        await peer.read(self.ticket, everything, self.pool, everything)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        await self.kill()
        await self.peers.close()
        for plane in self.planes:
            await plane.close()


@pytest.fixture(params=["shared_memory", "grpc"])
async def owner(request: pytest.FixtureRequest) -> AsyncIterator[RemoteOwner]:
    owner = await RemoteOwner.start(request.param)
    yield owner
    await owner.close()


async def test_bytes_of_another_process(owner: RemoteOwner) -> None:
    await owner.read()
    expected = torch.zeros_like(owner.pool)
    random_pool(expected, seed=1)
    assert torch.equal(owner.pool, expected.flip(0))  # the ticket names the blocks backwards
    peer = await owner.peers.get(owner.ticket)
    assert await peer.renew(owner.ticket) == 30.0
    assert await peer.release(owner.ticket, "reader")


async def test_kill_9_leaves_nothing(owner: RemoteOwner) -> None:
    num_mappings = Held.now().num_mappings
    segments = ProcessState.now().segments
    peer = await owner.peers.get(owner.ticket)
    await owner.read()
    assert list(owner.peers.incarnations) == [owner.ticket.incarnation]
    assert len(ProcessState.now().segments.keys() - segments.keys()) == (1 if owner.plane == "shared_memory" else 0)
    sockets = []
    if owner.plane == "shared_memory":
        sockets.append(wire.decode(PoolDescriptor, peer.description.planes["shared_memory"]).socket)
        assert socket_exists(sockets[0])
        assert num_pool_mappings() == num_mappings + 1

    await owner.kill()

    await eventually(lambda: len(owner.peers) == 0 and peer.connection.closed)
    assert list(owner.peers.incarnations) == []
    assert ProcessState.now().segments == segments
    assert num_pool_mappings() == num_mappings
    assert not [name for name in sockets if socket_exists(name)]
    assert shm_files() == []
    assert not [name for name in open_files() if "baton-kv" in name]
    with pytest.raises(TransferError):
        await peer.read(owner.ticket, [0], owner.pool, [0])
    with pytest.raises(TransferError):
        await peer.release(owner.ticket, "reader")
    with pytest.raises(TransferError):
        await owner.read()


async def test_kill_9_during_a_read(owner: RemoteOwner) -> None:
    num_mappings = Held.now().num_mappings
    peer = await owner.peers.get(owner.ticket)
    reading = asyncio.create_task(owner.read())
    await eventually(lambda: bool(owner.pool[0, 0]), interval_s=0)
    await owner.kill()
    async with asyncio.timeout(15):
        if owner.plane == "grpc":
            with pytest.raises(TransferError):
                await reading
        else:  # a copy may outrun the news of the end, so that only the commit fails
            await asyncio.wait([reading])
            assert reading.exception() is None or isinstance(reading.exception(), TransferError)
        with pytest.raises(TransferError):
            await peer.release(owner.ticket, "reader")
    await eventually(lambda: num_pool_mappings() == num_mappings and len(owner.peers) == 0)
