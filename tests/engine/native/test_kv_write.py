"""Norms, rotary embedding and the bytes in the blocks, against `Operations` and the torch packing."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.engine.operations import make_operations
from cluster.engine.rope import RotaryTable
from cluster.kv_layout import KVLayout
from cluster.model_config import RopeConfig
from tests.engine.native.attention import NativeAttention
from tests.engine.native.kv_blocks import pack, unpack
from tests.engine.native.paged_kv import make_layout, random

REFERENCE = make_operations("reference")
NUM_BLOCKS = 4


def rotary(head_dim: int) -> tuple[Tensor, Tensor]:
    cos, sin = RotaryTable(RopeConfig(theta=10000.0), head_dim, 500).at(torch.arange(500))
    return cos.view(500, -1).contiguous(), sin.view(500, -1).contiguous()


def rotated(heads: Tensor, table: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    result = heads.clone()
    cos, sin = (x[positions].view(len(positions), 1, 1, -1) for x in table)
    REFERENCE.rotate(result, cos, sin)
    return result


def expected_storage(layout: KVLayout, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """Packs K and V `[num_tokens, num_kv_heads, head_dim]` into zeroed blocks."""
    shape = (NUM_BLOCKS * layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    padded = [torch.zeros(shape), torch.zeros(shape)]
    for target, x in zip(padded, (keys, values), strict=True):
        target[slots, layer] = x
    blocked = [torch.unflatten(x, 0, (NUM_BLOCKS, -1)).permute(0, 2, 3, 1, 4) for x in padded]
    return pack(layout, *blocked)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kv_dtype=st.sampled_from(["bf16", "int8"]),
    block_size=st.sampled_from([16, 64]),
    head_dim=st.sampled_from([16, 64, 80, 256]),
    num_heads=st.sampled_from([2, 6]),
    num_tokens=st.integers(1, 40),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_writes_what_the_torch_packing_packs(
    *,
    native: ModuleType,
    isa: str,
    kv_dtype: str,
    block_size: int,
    head_dim: int,
    num_heads: int,
    num_tokens: int,
    threads: int,
    seed: int,
) -> None:
    native.set_num_threads(threads)
    layout = make_layout(kv_dtype, block_size=block_size, head_dim=head_dim)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens]
    positions = torch.randint(0, 500, (num_tokens,), generator=generator)
    qkv = random(num_tokens, num_heads + 4, head_dim, seed=seed)
    storage = pack(layout, *torch.zeros(2, NUM_BLOCKS, 2, 2, block_size, head_dim))
    queries = NativeAttention(native, layout, storage).write(1, qkv, rotary(head_dim), positions=positions, slots=slots)
    native.set_num_threads(1)
    heads = rotated(qkv[:, : num_heads + 2], rotary(head_dim), positions)
    assert torch.equal(queries, heads[:, :num_heads])
    assert torch.equal(storage, expected_storage(layout, 1, heads[:, num_heads:], qkv[:, num_heads + 2 :], slots))


def test_norms_come_before_the_rotation(native: ModuleType, isa: str) -> None:
    layout = make_layout("bf16", head_dim=64)
    qkv, positions, slots = random(5, 8, 64), torch.tensor([0, 3, 7, 8, 400]), torch.tensor([1, 20, 3, 40, 60])
    norms = (random(64, seed=1), random(64, seed=2), 1e-6)
    storage = torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8)
    queries = NativeAttention(native, layout, storage).write(0, qkv, rotary(64), positions=positions, slots=slots, norms=norms)
    normed = torch.cat([REFERENCE.rms_norm(qkv[:, :4], norms[0], norms[2]), REFERENCE.rms_norm(qkv[:, 4:6], norms[1], norms[2])], dim=1)
    heads = rotated(normed, rotary(64), positions)
    torch.testing.assert_close(queries, heads[:, :4], rtol=1e-5, atol=1e-5)
    stored = unpack(layout, storage)[0][slots // 16, 0, :, slots % 16]
    torch.testing.assert_close(stored, heads[:, 4:6], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("magnitude", [0.0, 1e-20, 1e-6, 1.0, 1e7])
def test_int8_of_all_magnitudes(native: ModuleType, isa: str, magnitude: float) -> None:
    layout = make_layout("int8")
    qkv = random(16, 6, 32) * magnitude
    storage = torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8)
    zeros = torch.zeros(16, dtype=torch.int64)
    NativeAttention(native, layout, storage).write(0, qkv, rotary(32), positions=zeros, slots=torch.arange(16))
    blocks = torch.stack([qkv[:, 2:4], qkv[:, 4:]]).transpose(1, 2)[:, None].expand(-1, 2, -1, -1, -1)
    expected = pack(layout, *blocks)
    half = layout.layer_stride
    assert torch.equal(storage[0, :half], expected[:half]) and not storage[0, half:].any() and not storage[1:].any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qkv", {"qkv": torch.zeros(3, 4, 32)}),
        ("qkv", {"qkv": torch.zeros(3, 6, 16)}),
        ("cos", {"rotary": (torch.zeros(500, 8), torch.zeros(500, 16))}),
        ("sin", {"rotary": (torch.zeros(500, 16), torch.zeros(400, 16))}),
        ("positions", {"positions": torch.tensor([0, 1, 500])}),
        ("positions", {"positions": torch.tensor([0, 1])}),
        ("slots", {"slots": torch.tensor([0, 1, 64])}),
        ("slots", {"slots": torch.tensor([0, 1, -1])}),
        ("slots", {"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}),
        ("key_norm", {"norms": (torch.zeros(32), torch.zeros(16), 1e-6)}),
    ],
)
def test_bad_input_is_named(native: ModuleType, name: str, change: dict[str, object]) -> None:
    layout = make_layout("bf16")
    attention = NativeAttention(native, layout, torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8))
    good = {"qkv": torch.zeros(3, 6, 32), "rotary": rotary(32), "positions": torch.arange(3), "slots": torch.arange(3)}
    attention.write(0, **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{name}:"):
        attention.write(0, **good | change)  # type: ignore[arg-type]
