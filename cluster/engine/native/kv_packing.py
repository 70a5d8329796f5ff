"""The packing "vnni" of KV blocks in plain torch: what the native attention kernels read and write, and how other layouts reach it.

One head of one block, then its scales if it has any (the layout around it is `KVLayout`'s):

    bf16   K [head_dim / 2][block_size][2]         V [block_size / 2][head_dim][2]
    int8   K [head_dim / 4][block_size][4] uint8   V [block_size / 2][head_dim][2] int8, then fp16 scales [block_size] each

int8: value = scale * level, one scale a token and head; K holds level + 128. `csrc/kv_view.h` says why it lies so.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cluster.kv_ticket import KV_DTYPE_BYTES, KVLayout

PACKING: Final = "vnni"
_WORD_BYTES: Final = 4
_MAX_FP16: Final = 65504.0
_MIN_NORMAL_FP16: Final = 2.0**-14


def check_layout(layout: KVLayout) -> None:
    """
    Raises:
        ValueError: the native kernels cannot read blocks of this layout; names the field.
    """
    if layout.packing != PACKING:
        raise ValueError(f"packing: {layout.packing} is not {PACKING}")
    if layout.kv_dtype not in ("bf16", "int8"):
        raise ValueError(f"kv_dtype: {layout.kv_dtype} is neither bf16 nor int8")
    if layout.head_dim % 16 or not 16 <= layout.head_dim <= 256:
        raise ValueError(f"head_dim: {layout.head_dim} is no multiple of 16 up to 256")
    if layout.block_size not in (16, 32, 64, 128):
        raise ValueError(f"block_size: {layout.block_size} is none of 16, 32, 64, 128")


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a row: float32 `[..., n]` → (int8 `[..., n]` in -127…127, fp16 scales `[...]`).

    A scale is rowmax / 127 rounded towards zero, and up where fp16 is subnormal, so an error is at most half of rowmax / 127 (and half
    of fp16's smallest step).
    """
    exact = x.abs().amax(dim=-1) / 127
    scales = exact.clamp_max(_MAX_FP16).half()
    bits = scales.view(torch.int16)
    is_normal = exact >= _MIN_NORMAL_FP16
    bits -= (is_normal & (scales.float() > exact)).to(torch.int16)
    bits += (~is_normal & (scales.float() < exact)).to(torch.int16)
    divisors = torch.where(scales == 0, 1.0, scales.float())
    return (x / divisors[..., None]).clamp(-127, 127).round().to(torch.int8), scales


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
    key_words, value_words = _words(layout, blocks)
    if layout.kv_dtype == "bf16":
        key_words.copy_(_bytes(torch.unflatten(keys.bfloat16(), -1, (-1, 2)).transpose(-3, -2)))
        value_words.copy_(_bytes(torch.unflatten(values.bfloat16(), -2, (-1, 2)).transpose(-1, -2)))
        return blocks
    for words, scales_out, x in zip((key_words, value_words), _scales(layout, blocks), (keys, values), strict=True):
        levels, scales = quantize_tokens(x)
        scales_out.copy_(_bytes(scales))
        if words is key_words:
            words.copy_(torch.unflatten(levels.view(torch.uint8) ^ 128, -1, (-1, 4)).transpose(-3, -2))
        else:
            words.copy_(torch.unflatten(levels.view(torch.uint8), -2, (-1, 2)).transpose(-1, -2))
    return blocks


def unpack(layout: KVLayout, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`: uint8 `[..., block_bytes]` → K and V, float32 `[..., num_layers, num_kv_heads, block_size, head_dim]` each.

    Raises:
        ValueError: a layout that the native kernels do not know.
    """
    check_layout(layout)
    key_words, value_words = _words(layout, blocks)
    if layout.kv_dtype == "bf16":
        keys = key_words.contiguous().view(torch.bfloat16).transpose(-3, -2).flatten(-2)
        values = value_words.contiguous().view(torch.bfloat16).transpose(-1, -2).flatten(-3, -2)
        return keys.float(), values.float()
    key_scales, value_scales = (scales.contiguous().view(torch.float16).float() for scales in _scales(layout, blocks))
    keys = (key_words.contiguous() ^ 128).view(torch.int8).transpose(-3, -2).flatten(-2)
    values = value_words.contiguous().view(torch.int8).transpose(-1, -2).flatten(-3, -2)
    return keys.float() * key_scales, values.float() * value_scales


def zero_tail(layout: KVLayout, block: Tensor, from_token: int) -> None:
    """Zeroes the bytes of a block, uint8 `[block_bytes]`, from its `from_token`-th token on, in all layers: equal tokens are equal bytes.

    Raises:
        ValueError: a layout that the native kernels do not know.
    """
    check_layout(layout)
    key_words, value_words = _words(layout, block)
    key_words[..., from_token:, :] = 0
    value_tokens = torch.unflatten(value_words, -1, (2, -1))  # [..., block_size / 2, head_dim, 2, bytes]
    value_tokens[..., (from_token + 1) // 2 :, :, :, :] = 0
    if from_token % 2 == 1:
        value_tokens[..., from_token // 2, :, 1, :] = 0
    if layout.kv_dtype == "int8":
        for scales in _scales(layout, block):
            scales[..., from_token:, :] = 0


def _heads(layout: KVLayout, blocks: Tensor) -> Tensor:
    """`[..., block_bytes]` → view `[..., num_layers, 2 (K, V), num_kv_heads, head_stride]`."""
    return torch.unflatten(blocks, -1, (layout.num_layers, 2, layout.num_kv_heads, layout.head_stride))


def _words(layout: KVLayout, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the bytes: K `[..., head_dim / k, block_size, bytes]` and V `[..., block_size / 2, head_dim, bytes]`, a word each."""
    data = _heads(layout, blocks)[..., : layout.data_bytes]
    value_word_bytes = 2 * KV_DTYPE_BYTES[layout.kv_dtype]
    keys = torch.unflatten(data.select(-3, 0), -1, (-1, layout.block_size, _WORD_BYTES))
    return keys, torch.unflatten(data.select(-3, 1), -1, (layout.block_size // 2, layout.head_dim, value_word_bytes))


def _scales(layout: KVLayout, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the scales' bytes `[..., num_layers, num_kv_heads, block_size, 2]` of K and V."""
    scales = _heads(layout, blocks)[..., layout.data_bytes : layout.data_bytes + 2 * layout.block_size]
    pairs = torch.unflatten(scales, -1, (layout.block_size, 2))
    return pairs.select(-4, 0), pairs.select(-4, 1)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of each element beside those of its neighbours in the last dimension; scales keep a dimension of their own."""
    if x.dtype == torch.float16:
        return x[..., None].contiguous().view(torch.uint8)
    return x.contiguous().view(torch.uint8)
