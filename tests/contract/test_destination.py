"""However a read ends, nothing writes to its destination any more: the rows may be another prompt's at once (`Connection.read`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
import torch

from cluster.errors import TransferError
from cluster.kv_ticket import KVTicket
from tests.contract.pair import Pair
from tests.kv_transfer.owner import LARGE, Owner
from tests.kv_transfer.planes import PLANES

NUM_BLOCKS = 32


@pytest.fixture(params=PLANES)
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Reads that take many slices, so that something can happen meanwhile."""
    for constant in ("block_copier._SLICE_BYTES", "nccl_link.GROUP_BYTES", "nixl._SLICE_BYTES"):
        monkeypatch.setattr(f"cluster.kv_transfer.{constant}", 2**20)
    async with Pair(request.param, None, LARGE, NUM_BLOCKS) as pair:
        yield pair


async def cancel(_pair: Pair, _ticket: KVTicket, reading: asyncio.Task[None]) -> None:
    reading.cancel()
    reading.cancel()  # twice, as by a deadline and a disconnect


async def close_connection(pair: Pair, ticket: KVTicket, _reading: asyncio.Task[None]) -> None:
    await (await pair.peers.get(ticket)).connection.close()


async def close_connection_of_a_cancelled_read(pair: Pair, ticket: KVTicket, reading: asyncio.Task[None]) -> None:
    peer = await pair.peers.get(ticket)
    reading.cancel()
    await peer.connection.close()


async def end_owner(pair: Pair, _ticket: KVTicket, _reading: asyncio.Task[None]) -> None:
    await pair.owner.close()


async def end_lease(pair: Pair, _ticket: KVTicket, _reading: asyncio.Task[None]) -> None:
    pair.owner.end_leases()


async def end_another_owner_too(pair: Pair, _ticket: KVTicket, reading: asyncio.Task[None]) -> None:
    """While its blocks are read beside ours."""
    async with another_owner(pair) as (other, theirs):
        failing = asyncio.create_task(pair.read(theirs, range(NUM_BLOCKS), range(NUM_BLOCKS)))
        await asyncio.sleep(0)
        await other.close()
        reading.cancel()
        await asyncio.wait([failing])


class another_owner:  # noqa: N801  # a context
    """One more worker to read from, by the same plane."""

    def __init__(self, pair: Pair) -> None:
        self._owner = Owner(pair.name, layout=LARGE, num_blocks=NUM_BLOCKS, maker=pair.maker)

    async def __aenter__(self) -> tuple[Owner, KVTicket]:
        await self._owner.start()
        return self._owner, self._owner.lease(range(NUM_BLOCKS))

    async def __aexit__(self, *_: object) -> None:
        await self._owner.close()


End = Callable[[Pair, KVTicket, "asyncio.Task[None]"], Awaitable[None]]
ENDS: tuple[End, ...] = (cancel, close_connection, close_connection_of_a_cancelled_read, end_owner, end_lease, end_another_owner_too)


@pytest.mark.parametrize("end", ENDS)
async def test_nothing_is_written_after_a_read_has_ended(pair: Pair, end: End) -> None:
    ticket = pair.owner.lease(range(NUM_BLOCKS - 1, -1, -1))
    await pair.read(ticket, [0], [0])  # opens the connection and starts the thread
    pair.pool.zero_()
    reading = await pair.read_until_first_block(ticket)
    await end(pair, ticket, reading)
    with suppress(TransferError, asyncio.CancelledError):
        await reading
    pair.pool.fill_(7)

    async with another_owner(pair) as (owner, theirs):  # what a thread, a stream or UCX may still be writing comes before this
        arrived = torch.zeros(2, LARGE.block_bytes, dtype=torch.uint8)
        await (await pair.peers.get(theirs)).read(theirs, [0, 1], arrived, [0, 1])
        assert torch.equal(arrived, owner.pool[:2])
    assert bool((pair.pool == 7).all())
