"""The arithmetic of block bytes, and fingerprints."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.kv_ticket import KV_DTYPE_BYTES, BlockRef, KVLayout, KVTicket

LAYOUTS = st.builds(
    KVLayout,
    num_layers=st.integers(1, 80),
    num_kv_heads=st.integers(1, 16),
    head_dim=st.integers(1, 256),
    block_size=st.sampled_from([8, 16, 32, 64, 128, 256]),
    kv_dtype=st.sampled_from(sorted(KV_DTYPE_BYTES)),
)


def test_smollm2() -> None:
    """23,040 bytes a token in bf16, as the model's shape says."""
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32, kv_dtype="bf16")
    assert layout.block_bytes == 32 * 23_040
    assert (layout.head_stride, layout.kv_stride, layout.layer_stride) == (4096, 12_288, 24_576)


def test_int8_carries_its_scales() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=32, kv_dtype="int8")
    assert layout.data_bytes == 2048
    assert layout.head_stride == 2048 + 64  # 32 scales of fp16


def test_padding_to_64() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=5, block_size=8, kv_dtype="bf16")
    assert layout.data_bytes == 80
    assert layout.head_stride == 128
    assert layout.block_bytes == 2 * 2 * 128


@given(LAYOUTS)
def test_parts_lie_side_by_side_and_aligned(layout: KVLayout) -> None:
    starts = [
        layer * layout.layer_stride + kv * layout.kv_stride + head * layout.head_stride
        for layer in range(layout.num_layers)
        for kv in range(2)
        for head in range(layout.num_kv_heads)
    ]
    assert starts == list(range(0, layout.block_bytes, layout.head_stride))
    assert layout.head_stride % 64 == 0
    scales = 2 * layout.block_size if layout.kv_dtype == "int8" else 0
    assert 0 <= layout.head_stride - layout.data_bytes - scales < 64
    assert layout.data_bytes == layout.block_size * layout.head_dim * KV_DTYPE_BYTES[layout.kv_dtype]


@given(LAYOUTS, st.integers(0, 100_000))
def test_num_blocks_for(layout: KVLayout, num_tokens: int) -> None:
    num_blocks = layout.num_blocks_for(num_tokens)
    assert num_blocks * layout.block_size >= num_tokens > (num_blocks - 1) * layout.block_size or num_tokens == num_blocks == 0


@given(LAYOUTS, LAYOUTS)
def test_fingerprints_are_equal_exactly_when_layouts_are(first: KVLayout, second: KVLayout) -> None:
    assert (first.fingerprint() == second.fingerprint()) == (first == second)
    assert len(first.fingerprint()) == 32


LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, kv_dtype="bf16")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KVLayout)])
def test_any_field_changes_the_fingerprint(name: str) -> None:
    value = getattr(LAYOUT, name)
    changed = KVLayout(**(dataclasses.asdict(LAYOUT) | {name: value * 2 if isinstance(value, int) else value + "x"}))
    assert changed.fingerprint() != LAYOUT.fingerprint()


def test_heads_and_dimensions_are_not_interchangeable() -> None:
    """The same bytes a block, read differently."""
    swapped = dataclasses.replace(LAYOUT, num_kv_heads=16, head_dim=2)
    assert swapped.data_bytes * swapped.num_kv_heads == LAYOUT.data_bytes * LAYOUT.num_kv_heads
    assert swapped.fingerprint() != LAYOUT.fingerprint()


def test_ticket_key_is_the_requests() -> None:
    ticket = KVTicket("r", 3, bytes(16), "i", "e", (BlockRef(1, 2),), 5, "l", "c", "d", 30.0)
    assert ticket.key == "r/3"
