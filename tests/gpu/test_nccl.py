"""NCCL on a device: one rank that sends to itself, and the whole plane between two processes on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from cluster.errors import TransferError
from cluster.kv_transfer.nccl_device import Rows
from cluster.kv_transfer.nccl_library import CupyDevice
from cluster.kv_transfer.nccl_rank import Rank
from cluster.kv_transfer.patience import Patience
from tests.kv_transfer.device_checks import (
    SIZES,
    check_groups_go_in_order,
    check_nothing_is_written_after_an_abort,
    check_rows_arrive,
    join_alone,
    random_rows,
    settle,
)
from tests.kv_transfer.owner import random_pool
from tests.kv_transfer.remote_owner import RemoteOwner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("num_rows", "row_bytes"), SIZES)
def test_rows_arrive(device: CupyDevice, memory: torch.device, num_rows: int, row_bytes: int) -> None:
    check_rows_arrive(device, memory, num_rows, row_bytes)


def test_groups_go_in_order(device: CupyDevice, memory: torch.device) -> None:
    check_groups_go_in_order(device, memory)


def test_nothing_is_written_after_an_abort(device: CupyDevice, memory: torch.device) -> None:
    check_nothing_is_written_after_an_abort(device, memory)


def test_a_receive_that_nobody_sends_is_told_and_aborted(device: CupyDevice, memory: torch.device) -> None:
    """NCCL sees it at once, as a rank of its own is to send."""
    communicator = join_alone(device)
    with pytest.raises(TransferError, match="NCCL"):
        communicator.post(receive=Rows(torch.zeros(1, 4096, dtype=torch.uint8, device=memory), [0]))
    communicator.abort()
    check_rows_arrive(device, memory, 2, 1000)


async def test_a_rank_on_the_event_loop(device: CupyDevice, memory: torch.device) -> None:
    rank = Rank(device)
    source, destination = random_rows(16, 737_280, memory), torch.zeros(16, 737_280, dtype=torch.uint8, device=memory)
    settle(memory)
    async with asyncio.timeout(60):
        unique_id = await rank.run(device.unique_id)
        await rank.wait_joined(rank.join(unique_id, 0, 1))
        longest_s, beating = 0.0, True

        async def beat() -> None:
            nonlocal longest_s
            loop = asyncio.get_running_loop()
            while beating:
                started_s = loop.time()
                await asyncio.sleep(0.001)
                longest_s = max(longest_s, loop.time() - started_s)

        heart = asyncio.create_task(beat())
        for _ in range(20):
            postings = [rank.post(send=Rows(source, range(16)), receive=Rows(destination, range(16))) for _ in range(2)]
            for posting in postings:
                await posting.wait(Patience(10))
        beating = False
        await heart
        assert longest_s < 0.25, "the device's calls must not hold up the event loop"
        await rank.abort("done")
        with pytest.raises(TransferError):
            await rank.post(send=Rows(source, [0])).wait(Patience(10))
    assert torch.equal(destination, source)


@pytest.fixture
async def owner() -> AsyncIterator[RemoteOwner]:
    """Another process, on another device where there is one; else NCCL, which takes no device twice, is told that it is another host's."""
    device = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    owner = await RemoteOwner.start("nccl", device, {"NCCL_HOSTID": "the owner's"})
    yield owner
    await owner.close()


async def test_a_pool_of_another_process(owner: RemoteOwner) -> None:
    async with asyncio.timeout(90):
        await owner.read()
        expected = torch.zeros(owner.pool.shape, dtype=torch.uint8)
        random_pool(expected, seed=1)
        assert torch.equal(owner.pool.cpu(), expected.flip(0))  # the ticket names the blocks backwards
        peer = await owner.peers.get(owner.ticket)
        reading = asyncio.create_task(owner.read())
        await asyncio.sleep(0.001)
        reading.cancel()
        await asyncio.wait([reading])
        owner.pool.fill_(7)
        settle(owner.pool.device)
        await asyncio.sleep(0.2)
        assert bool((owner.pool == 7).all()), "a read that has ended writes nothing any more"
        assert await peer.release(owner.ticket, "reader")


async def test_a_process_that_is_killed(owner: RemoteOwner) -> None:
    async with asyncio.timeout(90):
        await owner.read()
        peer = await owner.peers.get(owner.ticket)
        reading = asyncio.create_task(owner.read())
        owner.process.kill()
        await asyncio.wait([reading])
        assert reading.exception() is None or isinstance(reading.exception(), TransferError)
        while not peer.connection.closed:  # noqa: ASYNC110  # the connection's end is told by gRPC
            await asyncio.sleep(0.01)
        owner.pool.fill_(7)
        settle(owner.pool.device)
        await asyncio.sleep(0.2)
        assert bool((owner.pool == 7).all())
