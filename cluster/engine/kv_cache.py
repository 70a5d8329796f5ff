"""The KV pool of one engine: `[num_blocks, block_bytes]` of shared or private memory.

What is inside a block is the kernels' affair (`KVLayout.packing`); everything that moves whole blocks needs only `KVCache`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.kv_layout import KVLayout


class KVCache(ABC):
    """Copies blocks. Knows nothing of who owns them."""

    def __init__(self, layout: KVLayout, storage: Tensor) -> None:
        """
        Args:
            layout: shape and dtype of a block.
            storage: uint8 `[num_blocks, block_bytes]`, contiguous and zero-filled: attention reads the unused tail of a block, masked.
        """
        assert storage.dtype == torch.uint8 and storage.shape[1] == layout.block_bytes
        self.layout = layout
        self.storage = storage

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0]

    def copy_block(self, source: int, destination: int) -> None:
        """Copy-on-write: all bytes of one block."""
        self.storage[destination].copy_(self.storage[source])

    def read_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """A copy of whole blocks, uint8 `[len(block_ids), block_bytes]` (swap out)."""
        return self.storage.index_select(0, torch.tensor(block_ids, dtype=torch.int64))

    def write_blocks(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Puts back what `read_blocks` gave (swap in)."""
        self.storage.index_copy_(0, torch.tensor(block_ids, dtype=torch.int64), blocks)

    @abstractmethod
    def zero_tail(self, block_id: int, from_token: int) -> None:
        """Zeroes a partial block from its `from_token`-th token on, in all layers, so that equal tokens are equal bytes on the wire."""
