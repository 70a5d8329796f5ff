"""The KV pool of one engine: `[num_blocks, block_bytes]` of shared or private memory, seen as tensors.

The bytes of a block follow `KVLayout`: `[layer][K | V][kv_head][token][head_dim]`, all layers of a block together. Every view here is a
view of that one storage. Two flat views make steps cheap, since one index serves all layers when the view starts at the layer:

    token rows  one row is one token of one head (head_dim values): written when a step stores its K and V
    head rows   one row is one block of one head (block_size * head_dim values): read when a step gathers contexts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.kv_ticket import KVLayout

KV_DTYPES: Final = {"float32": torch.float32, "bf16": torch.bfloat16}


class KVCache:
    """Reads and writes blocks. Knows nothing of who owns them."""

    def __init__(self, layout: KVLayout, storage: Tensor) -> None:
        """
        Args:
            layout: shape and dtype of a block.
            storage: uint8 `[num_blocks, block_bytes]`, contiguous and zero-filled: attention reads the unused tail of a block, masked.

        Raises:
            ConfigError: the layout has padding between heads or a packing that this cache does not know.
        """
        if layout.kv_dtype not in KV_DTYPES or layout.packing != "rows":
            raise ConfigError(f"kv_dtype: {layout.kv_dtype}/{layout.packing} blocks are not supported by this engine", param="kv_dtype")
        if layout.head_stride != layout.data_bytes:
            raise ConfigError(
                f"block_size: one head of a block is {layout.data_bytes} bytes, which is no multiple of 64; use larger blocks",
                param="block_size",
            )
        assert storage.dtype == torch.uint8 and storage.shape[1] == layout.block_bytes
        self.layout = layout
        self.storage = storage
        self.dtype = KV_DTYPES[layout.kv_dtype]
        heads_per_layer = 2 * layout.num_kv_heads
        self._heads_per_block = layout.num_layers * heads_per_layer
        self._blocks = storage.view(self.dtype).view(self.num_blocks, self._heads_per_block, layout.block_size, layout.head_dim)
        head_rows = self._blocks.view(self.num_blocks * self._heads_per_block, layout.block_size * layout.head_dim)
        token_rows = self._blocks.view(-1, layout.head_dim)
        starts = [layer * heads_per_layer for layer in range(layout.num_layers)]
        self._head_rows = [head_rows[start:] for start in starts]
        self._token_rows = [token_rows[start * layout.block_size :] for start in starts]
        self._head_offsets = torch.arange(heads_per_layer)

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0]

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

    def copy_block(self, source: int, destination: int) -> None:
        """Copy-on-write: all bytes of one block."""
        self.storage[destination].copy_(self.storage[source])

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of whole blocks, uint8 `[len(block_ids), block_bytes]` (swap out)."""
        return self.storage.index_select(0, torch.tensor(block_ids, dtype=torch.int64))

    def write_blocks(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Puts back what `read_blocks` gave (swap in)."""
        self.storage.index_copy_(0, torch.tensor(block_ids, dtype=torch.int64), blocks)

    def zero_tail(self, block_id: int, from_token: int) -> None:
        """Zeroes a partial block from its `from_token`-th token on, in all layers, so that equal tokens are equal bytes on the wire."""
        self._blocks[block_id, :, from_token:] = 0
