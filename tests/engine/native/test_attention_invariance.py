"""Promise P0: a row has the same bits alone, in a batch, in any chunk, with any block size and any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.native.attention import NativeAttention
from tests.engine.native.kv_blocks import pack
from tests.engine.native.paged_kv import PagedKV, make_layout, random

SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
GROUP_SIZES = st.sampled_from([1, 3, 4, 7, 16])
WINDOWS = st.sampled_from([None, 1, 37, 256, 300])


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[int]:
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(1)


@KV_DTYPES
@SETTINGS
@given(group_size=GROUP_SIZES, window=WINDOWS, seed=st.integers(0, 99))
def test_decode_alone_and_in_a_batch(
    *, native: ModuleType, isa: str, num_threads: int, kv_dtype: str, group_size: int, window: int | None, seed: int
) -> None:
    lengths = torch.randint(1, 700, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    kv = PagedKV.build(make_layout(kv_dtype, num_kv_heads=3, head_dim=16), lengths, seed)
    attention = kv.attention(native)
    queries = random(8, 3 * group_size, 16, seed=seed)
    batch = attention.decode(1, queries, kv.block_tables, kv.context_lens, scale=0.3, window=window)
    native.set_num_threads(1)
    for row in range(8):
        one = slice(row, row + 1)
        alone = attention.decode(1, queries[one], kv.block_tables[one].contiguous(), kv.context_lens[one], scale=0.3, window=window)
        assert torch.equal(alone, batch[one])
    native.set_num_threads(num_threads)


@KV_DTYPES
@SETTINGS
@given(
    group_size=GROUP_SIZES,
    window=WINDOWS,
    first_position=st.sampled_from([0, 1, 100, 255, 256, 400]),
    cuts=st.lists(st.integers(1, 299), max_size=4, unique=True),
    head_dim=st.sampled_from([16, 64]),
)
def test_prefill_in_any_chunks(
    *,
    native: ModuleType,
    isa: str,
    num_threads: int,
    kv_dtype: str,
    group_size: int,
    window: int | None,
    first_position: int,
    cuts: list[int],
    head_dim: int,
) -> None:
    kv = PagedKV.build(make_layout(kv_dtype, head_dim=head_dim), [first_position + 300])
    attention = kv.attention(native)
    queries = random(300, 2 * group_size, head_dim)
    whole = attention.prefill(0, queries, first_position, kv.block_tables[0], scale=0.3, window=window)
    bounds = [0, *sorted(cuts), 300]
    for start, end in pairwise(bounds):
        piece = attention.prefill(0, queries[start:end], first_position + start, kv.block_tables[0], scale=0.3, window=window)
        assert torch.equal(piece, whole[start:end])
    for row in {0, 1, 150, 255, 256 - first_position % 256, 299}:
        row %= 300
        alone = attention.prefill(0, queries[row : row + 1], first_position + row, kv.block_tables[0], scale=0.3, window=window)
        assert torch.equal(alone, whole[row : row + 1])


@KV_DTYPES
def test_block_size_changes_no_bits(native: ModuleType, isa: str, kv_dtype: str) -> None:
    keys, values = random(1, 2, 512, 32), random(1, 2, 512, 32, seed=1)  # [num_layers, num_kv_heads, tokens, head_dim]
    results = []
    for block_size in (16, 32, 64, 128):
        layout = make_layout(kv_dtype, block_size=block_size, num_layers=1)
        blocks = [
            pack(layout, k, v) for k, v in zip(torch.split(keys, block_size, dim=2), torch.split(values, block_size, dim=2), strict=True)
        ]
        attention = NativeAttention(native, layout, torch.stack(blocks))
        table = torch.arange(len(blocks), dtype=torch.int32)
        decoded = attention.decode(0, random(1, 6, 32), table[None], torch.tensor([500], dtype=torch.int32), scale=0.2)
        results.append(torch.cat([decoded, attention.prefill(0, random(200, 6, 32), 300, table, scale=0.2)]))
    assert all(torch.equal(result, results[0]) for result in results)
