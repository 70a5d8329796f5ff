"""The arithmetic of block bytes, and which blocks can become which."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.kv_layout import KV_DTYPE_BYTES, KVLayout, can_become, why_no_handover

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


ROWS = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, kv_dtype="bf16")
VNNI = dataclasses.replace(ROWS, packing="vnni")
INT8 = dataclasses.replace(VNNI, kv_dtype="int8")
FLOAT32 = dataclasses.replace(ROWS, kv_dtype="float32")
POOLS = (FLOAT32, ROWS, VNNI, INT8)


@given(LAYOUTS)
def test_equal_layouts_need_no_repacking(layout: KVLayout) -> None:
    assert why_no_handover(layout, dataclasses.replace(layout)) is None


@pytest.mark.parametrize("source", POOLS)
@pytest.mark.parametrize("destination", POOLS)
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_kv_goes_to_as_many_bits_or_fewer(source: KVLayout, destination: KVLayout, block_size: int) -> None:
    reason = why_no_handover(source, dataclasses.replace(destination, block_size=block_size))
    if KV_DTYPE_BYTES[source.kv_dtype] < KV_DTYPE_BYTES[destination.kv_dtype]:
        assert reason == f"kv_dtype: {source.kv_dtype} cannot become {destination.kv_dtype}"
    else:
        assert reason is None
    assert can_become(source.kv_dtype, destination.kv_dtype) == (reason is None)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim"])
def test_another_model_is_refused_by_the_field(name: str) -> None:
    """`head_dim` too where the bytes of a block are as many."""
    changes: dict[str, Any] = {name: 32}
    for other in (dataclasses.replace(ROWS, **changes), dataclasses.replace(VNNI, block_size=8, **changes)):
        reason = why_no_handover(ROWS, other)
        assert reason is not None and reason.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"packing": "tiles"}, "packing"),
        ({"kv_dtype": "int8"}, "packing"),  # in rows, which no kernels have
        ({"kv_dtype": "fp8"}, "kv_dtype"),
    ],
)
def test_what_no_kernels_have_is_refused_whichever_side_has_it(changes: dict[str, Any], name: str) -> None:
    odd = dataclasses.replace(ROWS, **changes)
    reasons = [why_no_handover(VNNI, odd)] if changes == {"kv_dtype": "int8"} else [why_no_handover(odd, VNNI), why_no_handover(VNNI, odd)]
    for reason in reasons:
        assert reason is not None and reason.startswith(f"{name}: ")
