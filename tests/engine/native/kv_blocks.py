"""Blocks in the packing "vnni" made and read in plain torch: the oracle of what the kernels store."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cluster.engine.native.kv_packing import check_layout, scales, words
from cluster.kv_layout import KVLayout

_MAX_FP16: Final = 65504.0
_MIN_NORMAL_FP16: Final = 2.0**-14


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a row: float32 `[..., n]` → (int8 `[..., n]` in -127…127, fp16 scales `[...]`).

    A scale is rowmax / 127 rounded towards zero, and up where fp16 is subnormal, so an error is at most half of rowmax / 127 (and half
    of fp16's smallest step).
    """
    exact = x.abs().amax(dim=-1) / 127
    token_scales = exact.clamp_max(_MAX_FP16).half()
    bits = token_scales.view(torch.int16)
    is_normal = exact >= _MIN_NORMAL_FP16
    bits -= (is_normal & (token_scales.float() > exact)).to(torch.int16)
    bits += (~is_normal & (token_scales.float() < exact)).to(torch.int16)
    divisors = torch.where(token_scales == 0, 1.0, token_scales.float())
    return (x / divisors[..., None]).clamp(-127, 127).round().to(torch.int8), token_scales


def pack(layout: KVLayout, keys: Tensor, values: Tensor) -> Tensor:
    """
    Args:
        layout: of the blocks.
        keys: float32 `[..., num_layers, num_kv_heads, block_size, head_dim]`, as is `values`.

    Returns:
        uint8 `[..., block_bytes]`; padding is zero.

    Raises:
        ValueError: a layout that the native kernels do not know.
    """
    check_layout(layout)
    blocks = torch.zeros(*keys.shape[:-4], layout.block_bytes, dtype=torch.uint8)
    key_words, value_words = words(layout, blocks)
    if layout.kv_dtype == "bf16":
        key_words.copy_(_bytes(torch.unflatten(keys.bfloat16(), -1, (-1, 2)).transpose(-3, -2)))
        value_words.copy_(_bytes(torch.unflatten(values.bfloat16(), -2, (-1, 2)).transpose(-1, -2)))
        return blocks
    for out, scales_out, x in zip((key_words, value_words), scales(layout, blocks), (keys, values), strict=True):
        levels, token_scales = quantize_tokens(x)
        scales_out.copy_(_bytes(token_scales))
        if out is key_words:
            out.copy_(torch.unflatten(levels.view(torch.uint8) ^ 128, -1, (-1, 4)).transpose(-3, -2))
        else:
            out.copy_(torch.unflatten(levels.view(torch.uint8), -2, (-1, 2)).transpose(-1, -2))
    return blocks


def unpack(layout: KVLayout, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`: uint8 `[..., block_bytes]` → K and V, float32 `[..., num_layers, num_kv_heads, block_size, head_dim]` each.

    Raises:
        ValueError: a layout that the native kernels do not know.
    """
    check_layout(layout)
    key_words, value_words = words(layout, blocks)
    if layout.kv_dtype == "bf16":
        keys = key_words.contiguous().view(torch.bfloat16).transpose(-3, -2).flatten(-2)
        values = value_words.contiguous().view(torch.bfloat16).transpose(-1, -2).flatten(-3, -2)
        return keys.float(), values.float()
    key_scales, value_scales = (x.contiguous().view(torch.float16).float() for x in scales(layout, blocks))
    keys = (key_words.contiguous() ^ 128).view(torch.int8).transpose(-3, -2).flatten(-2)
    values = value_words.contiguous().view(torch.int8).transpose(-1, -2).flatten(-3, -2)
    return keys.float() * key_scales, values.float() * value_scales


def _bytes(x: Tensor) -> Tensor:
    """The bytes of each element beside those of its neighbours in the last dimension; scales keep a dimension of their own."""
    if x.dtype == torch.float16:
        return x[..., None].contiguous().view(torch.uint8)
    return x.contiguous().view(torch.uint8)
