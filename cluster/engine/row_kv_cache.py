"""The packing "rows" as tensors: `[layer][K | V][kv_head][token][head_dim]`, all layers of a block together.

Every view here is a view of the one storage. Two flat views make steps cheap, since one index serves all layers when the view starts at
the layer:

    token rows  one row is one token of one head (head_dim values): written when a step stores its K and V
    head rows   one row is one block of one head (block_size * head_dim values): read when a step gathers contexts
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cluster.engine.kv_cache import KVCache
from cluster.errors import ConfigError
from cluster.kv_layout import KVLayout

PACKING: Final = "rows"
_DTYPES: Final = {"float32": torch.float32, "bf16": torch.bfloat16}


class RowKVCache(KVCache):
    """What torch's own operations read and write."""

    def __init__(self, layout: KVLayout, storage: Tensor) -> None:
        """See `KVCache`.

        Raises:
            ConfigError: the layout has padding between heads, or a packing or dtype that torch's operations do not know.
        """
        super().__init__(layout, storage)
        if layout.kv_dtype not in _DTYPES or layout.packing != PACKING:
            raise ConfigError(f"kv_dtype: {layout.kv_dtype}/{layout.packing} blocks are not supported by these kernels", param="kv_dtype")
        if layout.head_stride != layout.data_bytes:
            raise ConfigError(
                f"block_size: one head of a block is {layout.data_bytes} bytes, which is no multiple of 64; use larger blocks",
                param="block_size",
            )
        self.dtype = _DTYPES[layout.kv_dtype]
        heads_per_layer = 2 * layout.num_kv_heads
        self._heads_per_block = layout.num_layers * heads_per_layer
        self._blocks = storage.view(self.dtype).view(self.num_blocks, self._heads_per_block, layout.block_size, layout.head_dim)
        head_rows = self._blocks.view(self.num_blocks * self._heads_per_block, layout.block_size * layout.head_dim)
        token_rows = self._blocks.view(-1, layout.head_dim)
        starts = [layer * heads_per_layer for layer in range(layout.num_layers)]
        self._head_rows = [head_rows[start:] for start in starts]
        self._token_rows = [token_rows[start * layout.block_size :] for start in starts]
        self._head_offsets = torch.arange(heads_per_layer)

    def layer_keys(self, layer: int) -> Tensor:
        """Strided view `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        start = layer * 2 * self.layout.num_kv_heads
        return self._blocks[:, start : start + self.layout.num_kv_heads]

    def layer_values(self, layer: int) -> Tensor:
        """Strided view `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        start = (layer * 2 + 1) * self.layout.num_kv_heads
        return self._blocks[:, start : start + self.layout.num_kv_heads]

    def write_index(self, slots: Tensor) -> Tensor:
        """For `write`: where tokens go, given their slots (`block_id * block_size + offset`, int64 `[num_tokens]`)."""
        size = self.layout.block_size
        first_rows = (slots // size) * (self._heads_per_block * size) + slots % size
        return (first_rows[:, None] + self._head_offsets * size).reshape(-1)

    def write(self, layer: int, index: Tensor, kv: Tensor) -> None:
        """Stores K and V of a step's tokens: `kv` is `[num_tokens, 2 * num_kv_heads, head_dim]`, K heads first."""
        self._token_rows[layer].index_copy_(0, index, kv.to(self.dtype).reshape(-1, self.layout.head_dim))

    def read_index(self, block_tables: Tensor) -> Tensor:
        """For `read`: int64 `[num_seqs, num_blocks_each]` → which rows to gather."""
        first_rows = block_tables * self._heads_per_block
        heads = self._head_offsets.view(2, 1, self.layout.num_kv_heads, 1)
        return (first_rows[None, :, None, :] + heads).reshape(-1)

    def read(self, layer: int, index: Tensor, num_seqs: int) -> Tensor:
        """Gathers contexts: contiguous `[2 (K, V), num_seqs, num_kv_heads, num_tokens, head_dim]`."""
        rows = self._head_rows[layer].index_select(0, index)
        return rows.view(2, num_seqs, self.layout.num_kv_heads, -1, self.layout.head_dim)

    def zero_tail(self, block_id: int, from_token: int) -> None:
        self._blocks[block_id, :, from_token:] = 0
