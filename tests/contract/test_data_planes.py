"""What every data plane must do, over a real KV service: one suite for all of them, within a process and between two."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from cluster.errors import PlaneUnavailable, TicketMismatch, TicketStale, TransferError, Unauthorized, WrongIncarnation
from cluster.kv_transfer.peers import Peers
from tests.contract.pair import PAIRS, Pair
from tests.eventually import eventually
from tests.kv_transfer.owner import CHECKPOINT, LARGE, SECRET, SMALL, Owner
from tests.kv_transfer.owner_elsewhere import OwnerElsewhere
from tests.kv_transfer.planes import NAMES, ONE_SIDED
from tests.kv_transfer.process_state import Held, nothing_beyond


@pytest.fixture(params=PAIRS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with Pair.of(request, SMALL, 600) as pair:
        yield pair


@pytest.fixture(params=PAIRS)
async def large_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Reads that take many slices, so that something can happen meanwhile."""
    for constant in ("block_copier._SLICE_BYTES", "nccl_link.GROUP_BYTES", "nixl._SLICE_BYTES"):
        monkeypatch.setattr(f"cluster.kv_transfer.{constant}", 2**20)
    async with Pair.of(request, LARGE, 96) as pair:
        yield pair


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 17, 300, 600])
async def test_any_blocks_in_any_order(pair: Pair, num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    ticket = pair.owner.lease(rng.sample(range(600), num_blocks))
    indexes = rng.sample(range(num_blocks), rng.randint(min(1, num_blocks), num_blocks))
    block_ids = rng.sample(range(600), len(indexes))

    await pair.read(ticket, indexes, block_ids)

    expected = torch.zeros_like(pair.pool)
    for index, block_id in zip(indexes, block_ids, strict=True):
        expected[block_id] = pair.owner.pool[ticket.blocks[index].block_id]
    assert torch.equal(pair.pool, expected)  # the rows asked for, and no other


async def test_blocks_larger_than_a_chunk(large_pair: Pair) -> None:
    ticket = large_pair.owner.lease([5, 3, 90])
    await large_pair.read(ticket, [0, 1, 2], [1, 0, 95])
    assert torch.equal(large_pair.pool[[1, 0, 95]], large_pair.owner.pool[[5, 3, 90]])


async def test_partial_block_travels_whole(pair: Pair) -> None:
    pair.owner.zero(4, 1024)
    pair.pool.fill_(255)
    ticket = pair.owner.lease([9, 4], num_tokens=SMALL.block_size + 2)
    await pair.read(ticket, [0, 1], [0, 1])
    assert torch.equal(pair.pool[:2], pair.owner.pool[[9, 4]])


async def test_ticket_of_another_domain_than_its_worker(pair: Pair) -> None:
    ticket = pair.owner.lease([1])
    with pytest.raises(TicketMismatch) as caught:
        await pair.peers.get(dataclasses.replace(ticket, domain="another"))
    assert caught.value.param == "domain"
    assert (await pair.peers.get(ticket)).description.domain == ticket.domain


async def test_reads_may_be_repeated_until_the_commit(pair: Pair) -> None:
    ticket = pair.owner.lease([1, 2, 3])
    peer = await pair.peers.get(ticket)
    for block_ids in ([0, 1, 2], [10, 11, 12]):
        await pair.read(ticket, [0, 1, 2], block_ids)
    assert torch.equal(pair.pool[:3], pair.pool[10:13])
    assert await peer.renew(ticket) == 30.0
    assert await peer.release(ticket, "reader")
    assert await peer.release(ticket, "reader")  # the same taker asks again
    assert not await peer.release(ticket, "another")
    assert await peer.renew(ticket) is None


async def test_stale_ticket_is_told_by_the_read_or_by_the_commit(pair: Pair) -> None:
    ticket = pair.owner.lease([1, 2])
    peer = await pair.peers.get(ticket)
    pair.owner.end_leases()
    if pair.name in ONE_SIDED:
        await pair.read(ticket, [0, 1], [0, 1])
    else:
        with pytest.raises(TicketStale):
            await pair.read(ticket, [0, 1], [0, 1])
        assert not pair.pool.any()
    assert not await peer.release(ticket, "reader")


async def test_lease_that_ends_during_a_read(large_pair: Pair) -> None:
    ticket = large_pair.owner.lease(range(96))
    reading = await large_pair.read_until_first_block(ticket)
    large_pair.owner.end_leases()
    if large_pair.name in ONE_SIDED:
        await reading
    else:
        with pytest.raises(TicketStale):
            await reading
    assert not await (await large_pair.peers.get(ticket)).release(ticket, "reader")


async def test_the_commit_says_which_ticket_was_read(pair: Pair) -> None:
    ticket = pair.owner.lease([1, 2])
    peer = await pair.peers.get(ticket)
    with pytest.raises(TicketMismatch):
        await peer.release(dataclasses.replace(ticket, blocks=ticket.blocks[::-1]), "reader")
    assert await peer.release(ticket, "reader")


async def test_other_nonce_takes_nothing(pair: Pair) -> None:
    ticket = pair.owner.lease([1])
    forged = dataclasses.replace(ticket, nonce=bytes(16))
    peer = await pair.peers.get(ticket)
    assert await peer.renew(forged) is None
    assert not await peer.release(forged, "reader")
    assert await peer.release(ticket, "reader")


async def test_wrong_incarnation(pair: Pair) -> None:
    ticket = dataclasses.replace(pair.owner.lease([1]), incarnation="another life")
    with pytest.raises(WrongIncarnation):
        await pair.peers.get(ticket)
    await eventually(lambda: len(pair.peers) == 0)


async def test_restart_at_the_same_address(pair: Pair) -> None:
    ticket = pair.owner.lease([1])
    peer = await pair.peers.get(ticket)
    await pair.restart()

    with pytest.raises((WrongIncarnation, TransferError)):
        await peer.read(ticket, [0], pair.pool, [0])
    with pytest.raises((WrongIncarnation, TransferError)):
        await peer.release(ticket, "reader")
    await eventually(lambda: len(pair.peers) == 0)
    with pytest.raises(WrongIncarnation):
        await pair.peers.get(ticket)
    second = pair.owner.lease([2])
    await pair.read(second, [0], [0])
    assert torch.equal(pair.pool[0], pair.owner.pool[2])


async def test_ticket_of_another_layout_or_model(pair: Pair) -> None:
    ticket = pair.owner.lease([1])
    foreign = dataclasses.replace(SMALL, num_layers=3)
    for other in (dataclasses.replace(ticket, layout=foreign), dataclasses.replace(ticket, checkpoint="other")):
        with pytest.raises(TicketMismatch) as caught:
            await pair.peers.get(other)
        assert caught.value.param == ("layout" if other.layout == foreign else "checkpoint")


async def test_peer_of_another_layout(pair: Pair) -> None:
    other = dataclasses.replace(SMALL, num_layers=3)
    pool = torch.zeros(8, other.block_bytes, dtype=torch.uint8)
    plane = pair.maker.make(pair.name, pool, "another reader")
    peers = Peers([plane], layout=other, checkpoint=CHECKPOINT, secret=SECRET)
    ticket = dataclasses.replace(pair.owner.lease([1]), layout=other)  # lies about what its issuer has
    with pytest.raises(TicketMismatch) as caught:
        await peers.get(ticket)
    assert caught.value.param == "layout"
    await peers.close()
    await plane.close()


async def test_blocks_outside_ticket_or_pool(pair: Pair) -> None:
    with pytest.raises(TicketMismatch) as caught:
        await pair.read(pair.owner.lease([1, 2]), [0, 2], [0, 1])
    assert caught.value.param == "indexes"
    with pytest.raises(TicketMismatch) as caught:
        await pair.read(pair.owner.lease([1, 600]), [0, 1], [0, 1])
    assert caught.value.param == "blocks"
    assert not pair.pool.any()


async def test_concurrent_reads(pair: Pair) -> None:
    rng = random.Random(3)
    tickets = [pair.owner.lease(rng.sample(range(600), 40)) for _ in range(15)]
    reads = (pair.read(ticket, range(40), range(40 * n, 40 * n + 40)) for n, ticket in enumerate(tickets))
    await asyncio.gather(*reads)
    source = [ref.block_id for ticket in tickets for ref in ticket.blocks]
    assert torch.equal(pair.pool, pair.owner.pool[source])
    assert len(pair.peers) == 1


async def test_cancelled_read_writes_nothing_afterwards(large_pair: Pair) -> None:
    ticket = large_pair.owner.lease(range(95, -1, -1))
    await large_pair.read(ticket, [0], [0])  # opens the connection and starts the thread
    before = Held.now()
    for _ in range(5):
        large_pair.pool.zero_()
        reading = await large_pair.read_until_first_block(ticket)
        reading.cancel()
        reading.cancel()  # twice, as by a deadline and a disconnect
        await asyncio.wait([reading])
        large_pair.pool.fill_(7)
        await large_pair.read(ticket, [0], [95])  # what a thread or stream might still be writing comes before this
        assert torch.equal(large_pair.pool[95], large_pair.owner.pool[95])
        assert bool((large_pair.pool[:95] == 7).all())
    await nothing_beyond(before)
    assert await (await large_pair.peers.get(ticket)).release(ticket, "reader")


async def test_owner_that_ends_during_a_read(large_pair: Pair) -> None:
    ticket = large_pair.owner.lease(range(96))
    reading = await large_pair.read_until_first_block(ticket)
    await large_pair.owner.close()
    async with asyncio.timeout(5):
        with pytest.raises(TransferError):
            await reading
    await eventually(lambda: len(large_pair.peers) == 0)


async def test_connection_closed_during_a_read(large_pair: Pair) -> None:
    ticket = large_pair.owner.lease(range(96))
    reading = await large_pair.read_until_first_block(ticket)
    connection = (await large_pair.peers.get(ticket)).connection
    await connection.close()
    await connection.close()
    with pytest.raises(TransferError):
        await reading
    assert connection.closed
    with pytest.raises(TransferError):
        await connection.read(ticket, [0], large_pair.pool, [0])
    await large_pair.read(ticket, [0], [95])  # the next one connects anew


async def test_wrong_secret(pair: Pair) -> None:
    peers = Peers([pair.plane], layout=SMALL, checkpoint=CHECKPOINT, secret="wrong")
    with pytest.raises(Unauthorized):
        await peers.get(pair.owner.lease([1]))
    await peers.close()


async def test_unreachable_peer(pair: Pair) -> None:
    ticket = dataclasses.replace(pair.owner.lease([1]), endpoint="127.0.0.1:1")
    with pytest.raises(TransferError):
        await pair.peers.get(ticket)


async def test_plane_the_peer_lacks(pair: Pair) -> None:
    peer = (await pair.peers.get(pair.owner.lease([1]))).description
    others = [pair.maker.make(name, pair.pool, "the reader") for name in NAMES if name != pair.name]
    peers = Peers(others, layout=SMALL, checkpoint=CHECKPOINT, secret=SECRET)
    with pytest.raises(PlaneUnavailable, match="the peer does not have it"):
        await peers.get(pair.owner.lease([1]))
    assert list(peer.planes) == [pair.name]
    await peers.close()
    for plane in others:
        await plane.close()


@pytest.fixture(params=PAIRS)
def make_pair(request: pytest.FixtureRequest) -> Callable[[], Pair]:
    return lambda: Pair.of(request, SMALL, 32)


async def test_a_closed_pair_leaves_nothing(make_pair: Callable[[], Pair]) -> None:
    async def live_and_end() -> Owner | OwnerElsewhere:
        async with make_pair() as pair:
            ticket = pair.owner.lease([1, 2])
            await pair.read(ticket, [0, 1], [0, 1])
            await pair.peers.close()
            await pair.plane.close()
            await pair.owner.close()
            # and once more, by the context: close is idempotent
        return pair.owner

    here, there = Held(), Held()
    for _ in range(3):  # gRPC keeps some descriptors and threads of its own, not the same each time
        owner = await live_and_end()
        here |= Held.now()
        there |= owner.held()
    for _ in range(3):
        owner = await live_and_end()
    await nothing_beyond(here)
    await nothing_beyond(there, owner.held)
