"""Reads from a worker in another process, and what is left when that process is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from cluster import wire
from cluster.errors import TransferError
from cluster.kv_transfer.shared_memory import PoolDescriptor
from cluster.process_state import ProcessState
from tests.eventually import eventually
from tests.kv_transfer.owner import random_pool
from tests.kv_transfer.planes import NEEDS_NIXL
from tests.kv_transfer.process_state import POOL_MAPPING, Held, num_pool_mappings, open_files, shm_files, socket_exists
from tests.kv_transfer.remote_owner import RemoteOwner


@pytest.fixture(params=["shared_memory", "nccl", pytest.param("nixl", marks=NEEDS_NIXL), "grpc"])
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
    num_mappings = Held.now()[POOL_MAPPING]
    segments = ProcessState.now().segments
    peer = await owner.peers.get(owner.ticket)
    await owner.read()
    assert list(owner.peers.incarnations) == [owner.ticket.incarnation]
    assert [(choice.incarnation, choice.plane) for choice in owner.peers.choices] == [(owner.ticket.incarnation, owner.plane)]
    assert len(ProcessState.now().segments.keys() - segments.keys()) == (1 if owner.plane == "shared_memory" else 0)
    sockets = []
    if owner.plane == "shared_memory":
        sockets.append(wire.decode(PoolDescriptor, peer.description.planes["shared_memory"]).socket)
        assert socket_exists(sockets[0])
        assert num_pool_mappings() == num_mappings + 1

    owner.process.kill()

    await eventually(lambda: len(owner.peers) == 0 and peer.connection.closed)
    assert owner.peers.incarnations == ()
    assert owner.peers.choices == ()
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
    num_mappings = Held.now()[POOL_MAPPING]
    peer = await owner.peers.get(owner.ticket)
    reading = asyncio.create_task(owner.read())
    await eventually(lambda: bool(owner.pool[0, 0]), interval_s=0)
    owner.process.kill()
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
    await owner.check_nothing_is_written_any_more()
