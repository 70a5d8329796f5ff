"""Blocks of another layout: read in parts, repacked into the reserved blocks, and never into a block that is cached or another's."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.engine import Reservation
from cluster.errors import TransferError
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer.repack import Repacker
from decode_worker.block_reader import BlockReader, Destination
from tests.decode_worker.fakes import Gate, ticket

OURS = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, kv_dtype="bf16")
UNTOUCHED = 77


class Peer:
    """A prefill worker's pool, and what was asked of it."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(num_blocks, layout.block_bytes // 2, generator=generator)
        self.pool = values.bfloat16().view(torch.uint8)
        self.indexes: list[int] = []
        self.destinations: set[int] = set()
        self.gate: Gate | None = None
        self.outlasts: asyncio.Event | None = None

    def ticket(self, num_tokens: int) -> KVTicket:
        blocks = tuple(BlockRef(len(self.pool) - 1 - index, 1) for index in range(self.layout.num_blocks_for(num_tokens)))
        return ticket(layout=self.layout, blocks=blocks, num_tokens=num_tokens)

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        self.indexes += indexes
        self.destinations.add(destination.data_ptr())
        try:
            if self.gate is not None:
                await self.gate()
        except asyncio.CancelledError:
            if self.outlasts is not None:
                await self.outlasts.wait()
            raise
        finally:
            for index, row in zip(indexes, block_ids, strict=True):
                destination[row] = self.pool[ticket.blocks[index].block_id]


class Bench:
    """A reader into a pool of 64 blocks that are all marked."""

    def __init__(self, source: KVLayout, *, ours: KVLayout = OURS, staging_bytes: int = 1) -> None:
        self.ours = ours
        self.peer = Peer(source, 32)
        self.pool = torch.full((64, ours.block_bytes), UNTOUCHED, dtype=torch.uint8)
        self.tails: list[tuple[int, int]] = []
        destination = Destination(self.pool, ours, "ckpt", "me", lambda block_id, from_token: self.tails.append((block_id, from_token)))
        self.reader = BlockReader(destination, staging_bytes, checksums=False)

    def expected(self, ticket: KVTicket) -> torch.Tensor:
        """The whole prompt in our blocks."""
        return Repacker(self.peer.layout, self.ours).repack(self.peer.pool[[ref.block_id for ref in ticket.blocks]])

    async def read(self, num_tokens: int, block_ids: tuple[int, ...], num_cached_blocks: int = 0) -> int:
        ticket = self.peer.ticket(num_tokens)
        return await self.reader.begin(self.peer, ticket, Reservation("r/0", block_ids, num_cached_blocks)).finish(ticket)


@pytest.mark.parametrize("block_size", [2, 4, 16, 32])
@pytest.mark.parametrize("packing", ["rows", "vnni"])
@pytest.mark.parametrize("ours", [OURS, replace(OURS, kv_dtype="int8", packing="vnni")])
@pytest.mark.parametrize("staging_bytes", [1, 5000, 2**20])
async def test_what_is_missing_arrives_and_nothing_else_is_written(
    block_size: int, packing: str, ours: KVLayout, staging_bytes: int
) -> None:
    source = replace(OURS, block_size=block_size, packing=packing)
    for num_tokens in (1, 7, 8, 9, 16, 31, 32, 33, 40):
        num_blocks = ours.num_blocks_for(num_tokens)
        block_ids = tuple(range(60, 60 - 3 * num_blocks, -3))
        for num_cached in range(num_tokens // ours.block_size + 1):
            bench = Bench(source, ours=ours, staging_bytes=staging_bytes)
            num_read = await bench.read(num_tokens, block_ids, num_cached)
            ticket = bench.peer.ticket(num_tokens)
            first = num_cached * ours.block_size // block_size
            is_missing = num_cached < num_blocks
            assert bench.peer.indexes == (list(range(first, len(ticket.blocks))) if is_missing else [])
            assert num_read == len(bench.peer.indexes)
            expected = torch.full_like(bench.pool, UNTOUCHED)
            expected[list(block_ids[num_cached:])] = bench.expected(ticket)[num_cached:num_blocks]
            assert torch.equal(bench.pool, expected)
            assert bench.tails == ([(block_ids[-1], num_tokens % 8)] if num_tokens % 8 else [])
            bench.reader.close()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_runs_behind_marks_bring_the_same_as_one_read(data: st.DataObject) -> None:
    """Each block travels once, whatever the marks; of a mark that fills no block of ours nothing is read yet."""
    source = replace(OURS, block_size=data.draw(st.sampled_from([2, 4, 8, 16, 32])), packing=data.draw(st.sampled_from(["rows", "vnni"])))
    num_tokens = data.draw(st.integers(1, 60))
    num_blocks = OURS.num_blocks_for(num_tokens)
    num_cached = data.draw(st.integers(0, num_tokens // OURS.block_size))
    marks = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=6)))
    bench = Bench(source, staging_bytes=data.draw(st.sampled_from([1, 5000, 2**20])))
    ticket, block_ids = bench.peer.ticket(num_tokens), tuple(range(60, 60 - 3 * num_blocks, -3))

    async def read() -> int:
        reading = bench.reader.begin(bench.peer, replace(ticket, first_token=None), Reservation("r/0", block_ids, num_cached))
        for mark in marks:
            await reading.read_ready(mark)
            assert all((index + 1) * source.block_size <= mark for index in bench.peer.indexes), "only what is computed"
        return await reading.finish(ticket)

    assert asyncio.run(read()) == len(bench.peer.indexes) == len(set(bench.peer.indexes))
    expected = torch.full_like(bench.pool, UNTOUCHED)
    expected[list(block_ids[num_cached:])] = bench.expected(ticket)[num_cached:num_blocks]
    assert torch.equal(bench.pool, expected)
    assert bench.tails == ([(block_ids[-1], num_tokens % 8)] if num_tokens % 8 else [])
    bench.reader.close()


async def test_equal_blocks_take_no_detour() -> None:
    bench = Bench(OURS)
    assert await bench.read(20, (9, 4, 6), 1) == 2
    assert bench.peer.destinations == {bench.pool.data_ptr()}
    assert torch.equal(bench.pool[[4, 6]], bench.expected(bench.peer.ticket(20))[1:])


async def test_many_handoffs_share_one_small_area() -> None:
    """It stays the same memory for good: a plane may register it once."""
    bench = Bench(replace(OURS, block_size=4), staging_bytes=4 * 4 * OURS.block_bytes)
    prompts = [(number, tuple(range(5 * number, 5 * number + 5))) for number in range(12)]
    await asyncio.gather(*(bench.read(33 + number % 8, block_ids) for number, block_ids in prompts))
    await asyncio.gather(*(bench.read(33 + number % 8, block_ids) for number, block_ids in prompts))
    for number, block_ids in prompts:
        assert torch.equal(bench.pool[list(block_ids)], bench.expected(bench.peer.ticket(33 + number % 8)))
    assert len(bench.peer.destinations) == 1


async def test_a_part_is_anothers_only_when_the_read_into_it_has_ended() -> None:
    bench = Bench(replace(OURS, block_size=16))  # an area of one part
    bench.peer.gate, bench.peer.outlasts = Gate(), asyncio.Event()
    first = asyncio.create_task(bench.read(16, (1, 2)))
    await bench.peer.gate.reached.wait()
    second = asyncio.create_task(bench.read(32, (3, 4, 5, 6)))
    first.cancel()
    await asyncio.sleep(0.01)
    assert bench.peer.indexes == [0], "the cancelled read may still write"
    bench.peer.gate.open.set()
    bench.peer.outlasts.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert torch.equal(bench.pool[3:7], bench.expected(bench.peer.ticket(32)))
    assert bool((bench.pool[1:3] == UNTOUCHED).all())


async def test_cancelled_handoffs_leave_the_area_whole() -> None:
    bench = Bench(replace(OURS, block_size=4), staging_bytes=2**14)
    for _ in range(3):
        bench.peer.gate = Gate()
        tasks = [asyncio.create_task(bench.read(40, tuple(range(5)))) for _ in range(8)]
        await bench.peer.gate.reached.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    bench.peer.gate = None
    async with asyncio.timeout(5):
        await bench.read(40, tuple(range(5)))
    assert torch.equal(bench.pool[:5], bench.expected(bench.peer.ticket(40)))


async def test_checksums_are_of_the_peers_blocks_and_checked_before_anything_is_repacked() -> None:
    bench = Bench(replace(OURS, block_size=4))
    good = bench.peer.ticket(20)
    checksums = tuple(zlib.crc32(bench.peer.pool[ref.block_id].numpy().tobytes()) for ref in good.blocks)
    reservation = Reservation("r/0", (9, 4, 6), 0)
    checked = replace(good, checksums=checksums)
    assert await bench.reader.begin(bench.peer, checked, reservation).finish(checked) == 5

    bench = Bench(replace(OURS, block_size=4))
    bench.peer.pool[good.blocks[1].block_id, 17] ^= 1
    with pytest.raises(TransferError) as caught:
        await bench.reader.begin(bench.peer, checked, reservation).finish(checked)
    assert caught.value.param == "checksums" and "[1]" in caught.value.message
    assert bool((bench.pool == UNTOUCHED).all())
