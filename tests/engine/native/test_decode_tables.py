"""Tables that live from step to step say in every step what its spans say."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from cluster.engine.forward_batch import BatchSpan
from cluster.engine.native.decode_tables import DecodeTables

NUM_BLOCKS = 900


def read(address: int, *shape: int) -> np.ndarray:
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))
    return np.ctypeslib.as_array(pointer, shape)


def test_rows_are_those_of_the_last_fill() -> None:
    tables, chance = DecodeTables(), random.Random(3)
    kept = [(4, 5), (6,)]
    for step in range(200):
        block_ids = [*kept, *(tuple(chance.choices(range(NUM_BLOCKS), k=chance.randrange(1, 9))) for _ in range(chance.randrange(12)))]
        chance.shuffle(block_ids)
        spans = [BatchSpan(row, 1, 16 * len(ids) - 1 - step % 16, ids, False) for row, ids in enumerate(block_ids)]
        tables.fill(spans, NUM_BLOCKS)
        rows = read(tables.tables_address, len(spans), tables.num_columns)
        assert [tuple(row[: len(ids)]) for row, ids in zip(rows, block_ids, strict=True)] == block_ids
        assert read(tables.context_lens_address, len(spans)).tolist() == [span.end for span in spans]


def test_no_rows() -> None:
    tables = DecodeTables()
    tables.fill([], NUM_BLOCKS)
    assert tables.num_columns == 0


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_blocks_beyond_the_pool_are_refused(block_id: int) -> None:
    tables, good = DecodeTables(), BatchSpan(0, 1, 5, (3,), False)
    with pytest.raises(ValueError, match="block_ids"):
        tables.fill([BatchSpan(0, 1, 20, (3, block_id), False)], NUM_BLOCKS)
    tables.fill([good], NUM_BLOCKS)
    assert read(tables.tables_address, 1, 1).tolist() == [[3]]
