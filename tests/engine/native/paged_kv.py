"""A KV pool with known contents in scattered blocks, and what attention over it must give, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from cluster.engine.native.kv_packing import PACKING, zero_tail
from cluster.kv_layout import KVLayout
from tests.engine.native.attention import NativeAttention
from tests.engine.native.kv_blocks import pack, unpack


def make_layout(kv_dtype: str, *, num_kv_heads: int = 2, head_dim: int = 32, block_size: int = 16, num_layers: int = 2) -> KVLayout:
    return KVLayout(num_layers, num_kv_heads, head_dim, block_size, kv_dtype, PACKING)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class PagedKV:
    """Sequences of given lengths; whatever is not theirs is NaN, or 255 where there is no NaN."""

    layout: KVLayout
    storage: Tensor
    block_tables: Tensor  # int32 [num_seqs, max_blocks], -1 behind the end
    context_lens: Tensor  # int32 [num_seqs]
    keys: Tensor  # float32 [num_seqs, num_layers, num_kv_heads, max_tokens, head_dim]: as stored, rounded
    values: Tensor

    @staticmethod
    def build(layout: KVLayout, lengths: list[int], seed: int = 0) -> PagedKV:
        max_blocks = max(layout.num_blocks_for(length) for length in lengths)
        num_blocks = max_blocks * len(lengths)
        tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).view(len(lengths), max_blocks)
        shape = (len(lengths), max_blocks, layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim)
        blocks = pack(layout, random(*shape, seed=seed + 1), random(*shape, seed=seed + 2))
        keys, values = (x.permute(0, 2, 3, 1, 4, 5).flatten(3, 4) for x in unpack(layout, blocks))
        # Blocks lie apart, so that a stride other than the block's own length is seen.
        storage = torch.full((num_blocks, layout.block_bytes + 192), 255, dtype=torch.uint8)[:, : layout.block_bytes]
        for sequence, length in enumerate(lengths):
            for index in range(layout.num_blocks_for(length)):
                used = min(layout.block_size, length - index * layout.block_size)
                storage[tables[sequence, index]] = spoil_tail(layout, blocks[sequence, index], used)
            tables[sequence, layout.num_blocks_for(length) :] = -1
        return PagedKV(layout, storage, tables.int(), torch.tensor(lengths, dtype=torch.int32), keys, values)

    def attention(self, native: ModuleType) -> NativeAttention:
        return NativeAttention(native, self.layout, self.storage)

    def expected(self, sequence: int, layer: int, queries: Tensor, first_position: int, *, scale: float, window: int | None) -> Tensor:
        """Rows of one sequence: float32 `[num_tokens, num_heads, head_dim]` → float64 of the same shape."""
        end = first_position + len(queries)
        group_size = queries.shape[1] // self.layout.num_kv_heads
        keys = self.keys[sequence, layer, :, :end].double().repeat_interleave(group_size, dim=0)
        values = self.values[sequence, layer, :, :end].double().repeat_interleave(group_size, dim=0)
        scores = rounded_queries(queries, self.layout.kv_dtype).double().transpose(0, 1) @ keys.transpose(1, 2) * scale
        distance = torch.arange(first_position, end)[:, None] - torch.arange(end)
        is_hidden = (distance < 0) | (distance >= (window or end))
        return (scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def rounded_queries(queries: Tensor, kv_dtype: str) -> Tensor:
    """What the dot products see: bfloat16, or 8 bits with one scale a head."""
    if kv_dtype == "bf16":
        return queries.bfloat16().float()
    magnitudes = queries.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    inverses = torch.full_like(magnitudes, 127.0) / magnitudes  # a plain 127 / magnitudes rounds twice: it multiplies by the reciprocal
    return (queries * inverses).round() * (magnitudes / 127)


def spoil_tail(layout: KVLayout, block: Tensor, from_token: int) -> Tensor:
    """The block with all bits set from its `from_token`-th token on."""
    is_kept = torch.full_like(block, 255)
    zero_tail(layout, is_kept, from_token)
    return block | ~is_kept
