"""The packing "vnni" of KV blocks, which the native attention kernels read and write, as views in torch.

One head of one block, then its scales if it has any (the layout around it is `KVLayout`'s):

    bf16   K [head_dim / 2][block_size][2]         V [block_size / 2][head_dim][2]
    int8   K [head_dim / 4][block_size][4] uint8   V [block_size / 2][head_dim][2] int8, then fp16 scales [block_size] each

int8: value = scale * level, one scale a token and head; K holds level + 128. `csrc/kv_view.h` says why it lies so.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cluster.engine.native.limits import why_unfit_block_size, why_unfit_head_dim
from cluster.kv_layout import KV_DTYPE_BYTES, KVLayout

PACKING: Final = "vnni"
_WORD_BYTES: Final = 4


def check_layout(layout: KVLayout) -> None:
    """
    Raises:
        ValueError: the native kernels cannot read blocks of this layout; names the field.
    """
    if layout.packing != PACKING:
        raise ValueError(f"packing: {layout.packing} is not {PACKING}")
    if layout.kv_dtype not in ("bf16", "int8"):
        raise ValueError(f"kv_dtype: {layout.kv_dtype} is neither bf16 nor int8")
    for name, reason in (
        ("head_dim", why_unfit_head_dim(layout.head_dim)),
        ("block_size", why_unfit_block_size(layout.block_size)),
    ):
        if reason is not None:
            raise ValueError(f"{name}: {reason}")


def zero_tail(layout: KVLayout, block: Tensor, from_token: int) -> None:
    """Zeroes the bytes of a block, uint8 `[block_bytes]`, from its `from_token`-th token on, in all layers: equal tokens are equal bytes.

    Raises:
        ValueError: a layout that the native kernels do not know.
    """
    check_layout(layout)
    key_words, value_words = words(layout, block)
    key_words[..., from_token:, :] = 0
    value_tokens = torch.unflatten(value_words, -1, (2, -1))  # [..., block_size / 2, head_dim, 2, bytes]
    value_tokens[..., (from_token + 1) // 2 :, :, :, :] = 0
    if from_token % 2 == 1:
        value_tokens[..., from_token // 2, :, 1, :] = 0
    if layout.kv_dtype == "int8":
        for of_tokens in scales(layout, block):
            of_tokens[..., from_token:, :] = 0


def _heads(layout: KVLayout, blocks: Tensor) -> Tensor:
    """`[..., block_bytes]` → view `[..., num_layers, 2 (K, V), num_kv_heads, head_stride]`."""
    return torch.unflatten(blocks, -1, (layout.num_layers, 2, layout.num_kv_heads, layout.head_stride))


def words(layout: KVLayout, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the bytes: K `[..., head_dim / k, block_size, bytes]` and V `[..., block_size / 2, head_dim, bytes]`, a word each."""
    data = _heads(layout, blocks)[..., : layout.data_bytes]
    value_word_bytes = 2 * KV_DTYPE_BYTES[layout.kv_dtype]
    keys = torch.unflatten(data.select(-3, 0), -1, (-1, layout.block_size, _WORD_BYTES))
    return keys, torch.unflatten(data.select(-3, 1), -1, (layout.block_size // 2, layout.head_dim, value_word_bytes))


def scales(layout: KVLayout, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the scales' bytes `[..., num_layers, num_kv_heads, block_size, 2]` of K and V."""
    flat = _heads(layout, blocks)[..., layout.data_bytes : layout.data_bytes + 2 * layout.block_size]
    pairs = torch.unflatten(flat, -1, (layout.block_size, 2))
    return pairs.select(-4, 0), pairs.select(-4, 1)
