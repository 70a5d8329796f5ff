"""Packing and unpacking of blocks, with every way in which chunks can be wrong."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import TransferError
from cluster.kv_transfer.chunks import CHUNK_BYTES, ChunkWriter, pack_chunks
from tests.kv_transfer.owner import random_pool


@functools.cache
def filled(num_blocks: int, block_bytes: int) -> torch.Tensor:
    pool = torch.empty(num_blocks, block_bytes, dtype=torch.uint8)
    random_pool(pool, seed=num_blocks)
    return pool


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 19), max_size=40), st.sampled_from([64, CHUNK_BYTES // 4, CHUNK_BYTES // 2 + 64, CHUNK_BYTES + 64]))
def test_round_trip(rows: list[int], block_bytes: int) -> None:
    rows = rows if block_bytes == 64 else rows[:6]
    pool = filled(20, block_bytes)
    destination = torch.zeros(max(1, len(rows)), block_bytes, dtype=torch.uint8)
    block_ids = range(len(rows) - 1, -1, -1)
    writer = ChunkWriter(destination, block_ids)
    for index, data in pack_chunks(pool, rows):
        assert len(data) == block_bytes or len(data) <= CHUNK_BYTES
        writer.write(index, data)
    writer.finish()
    assert torch.equal(destination[list(block_ids)], pool[rows])


def test_chunk_is_read_when_it_is_asked_for() -> None:
    pool = filled(2, CHUNK_BYTES).clone()
    chunks = pack_chunks(pool, [0, 1])
    next(chunks)
    pool.zero_()
    assert not any(next(chunks)[1])


BLOCK = b"\1" * 64


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "asked for 3 blocks, got 0"),
        ([(0, BLOCK), (1, BLOCK)], "asked for 3 blocks, got 2"),
        ([(0, BLOCK), (0, BLOCK)], "expected the chunk of block 1"),
        ([(0, BLOCK), (2, BLOCK)], "expected the chunk of block 1"),
        ([(1, BLOCK)], "expected the chunk of block 0"),
        ([(2**31, BLOCK)], "expected the chunk of block 0"),
        ([(0, BLOCK[:-1])], "not made of blocks"),
        ([(0, BLOCK + b"\1")], "not made of blocks"),
        ([(0, b"")], "not made of blocks"),
        ([(0, BLOCK * 4)], "got 4"),
        ([(0, BLOCK * 2), (2, BLOCK * 2)], "got 4"),
        ([(0, BLOCK * 3), (3, BLOCK)], "got 4"),
    ],
)
def test_wrong_chunks(chunks: list[tuple[int, bytes]], message: str) -> None:
    destination = torch.zeros(8, 64, dtype=torch.uint8)
    writer = ChunkWriter(destination, [4, 5, 6])

    def receive() -> None:
        for index, data in chunks:
            writer.write(index, data)
        writer.finish()

    with pytest.raises(TransferError, match=message):
        receive()
    assert not destination[[0, 1, 2, 3, 7]].any()  # nothing outside the rows that were asked for
