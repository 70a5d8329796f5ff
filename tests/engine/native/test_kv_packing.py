"""The packing "vnni" byte by byte, and its way back."""

from __future__ import annotations

import pytest
import torch

from cluster.engine.native.kv_packing import zero_tail
from cluster.kv_layout import KVLayout
from tests.engine.native.kv_blocks import pack, quantize_tokens, unpack
from tests.engine.native.paged_kv import make_layout, random


def test_bf16_words_lie_where_the_packing_says() -> None:
    layout = make_layout("bf16")
    keys, values = random(2, 2, 16, 32), random(2, 2, 16, 32, seed=1)
    block = pack(layout, keys, values)
    assert block.shape == (layout.block_bytes,)
    for layer, head, token, dim in [(0, 0, 0, 0), (1, 1, 15, 31), (1, 0, 7, 12), (0, 1, 8, 3)]:
        start = layer * layout.layer_stride + head * layout.head_stride
        key = start + ((dim // 2 * 16 + token) * 2 + dim % 2) * 2
        value = start + layout.kv_stride + ((token // 2 * 32 + dim) * 2 + token % 2) * 2
        assert block[key : key + 2].view(torch.bfloat16) == keys[layer, head, token, dim].bfloat16()
        assert block[value : value + 2].view(torch.bfloat16) == values[layer, head, token, dim].bfloat16()


def test_int8_words_and_scales_lie_where_the_packing_says() -> None:
    layout = make_layout("int8")
    keys, values = random(2, 2, 16, 32), random(2, 2, 16, 32, seed=1)
    block = pack(layout, keys, values)
    for layer, head, token, dim in [(0, 0, 0, 0), (1, 1, 15, 31), (1, 0, 7, 13), (0, 1, 8, 3)]:
        start = layer * layout.layer_stride + head * layout.head_stride
        key_level = int(block[start + (dim // 4 * 16 + token) * 4 + dim % 4]) - 128
        value_level = int(block[start + layout.kv_stride + (token // 2 * 32 + dim) * 2 + token % 2].view(torch.int8))
        scales = [
            block[at : at + 2].view(torch.float16).float() for at in (start + 512 + 2 * token, start + layout.kv_stride + 512 + 2 * token)
        ]
        for level, scale, x in zip((key_level, value_level), scales, (keys, values), strict=True):
            assert abs(level * scale - x[layer, head, token, dim]) <= x[layer, head, token].abs().max() / 253.9


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("block_size", [16, 128])
def test_unpack_is_the_inverse(kv_dtype: str, block_size: int) -> None:
    layout = make_layout(kv_dtype, block_size=block_size)
    keys, values = random(3, 2, 2, block_size, 32), random(3, 2, 2, block_size, 32, seed=1)
    blocks = pack(layout, keys, values)
    for x, unpacked in zip((keys, values), unpack(layout, blocks), strict=True):
        bound = x.abs().amax(-1, keepdim=True) / 254 * 1.0001 if kv_dtype == "int8" else x.abs() * 2**-8
        assert ((unpacked - x).abs() <= bound).all()
    assert torch.equal(pack(layout, *unpack(layout, blocks)), blocks) or kv_dtype == "int8"


@pytest.mark.parametrize("magnitude", [0.0, 1e-12, 1e-6, 1e-4, 0.01, 1.0, 60000.0, 1e7])
def test_quantization_error_is_half_a_level(magnitude: float) -> None:
    x = random(400, 64) * magnitude
    levels, scales = quantize_tokens(x)
    bound = x.abs().amax(-1, keepdim=True) / 254 + 2**-25 if magnitude < 1e7 else torch.tensor(65504.0)
    error = (levels.float() * scales.float()[:, None] - x).abs()
    in_range = x.abs() <= 127 * 65504.0
    assert (error[in_range] <= (bound * 1.00001).expand_as(x)[in_range]).all() and levels.min() >= -127


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("from_token", [0, 1, 5, 8, 15, 16])
def test_zero_tail_leaves_the_tokens_before_it(kv_dtype: str, from_token: int) -> None:
    layout = make_layout(kv_dtype)
    block = pack(layout, random(2, 2, 16, 32), random(2, 2, 16, 32, seed=1))
    before = unpack(layout, block)
    zero_tail(layout, block, from_token)
    for x, tail_cut in zip(before, unpack(layout, block), strict=True):
        assert torch.equal(tail_cut[..., :from_token, :], x[..., :from_token, :]) and not tail_cut[..., from_token:, :].any()
    used = torch.full_like(block, 255)
    zero_tail(layout, used, from_token)
    tail_bytes = 2 * 2 * 2 * (16 - from_token) * (64 if kv_dtype == "bf16" else 34)
    assert int((used == 0).sum()) == tail_bytes and not block[used == 0].any()


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (KVLayout(1, 1, 32, 16, "bf16"), "packing"),
        (KVLayout(1, 1, 32, 16, "float32", "vnni"), "kv_dtype"),
        (KVLayout(1, 1, 24, 16, "bf16", "vnni"), "head_dim"),
        (KVLayout(1, 1, 272, 16, "bf16", "vnni"), "head_dim"),
        (KVLayout(1, 1, 32, 8, "bf16", "vnni"), "block_size"),
    ],
)
def test_other_layouts_are_refused(layout: KVLayout, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        zero_tail(layout, torch.zeros(layout.block_bytes, dtype=torch.uint8), 0)
