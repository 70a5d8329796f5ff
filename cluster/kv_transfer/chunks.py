"""Blocks as messages: the owner packs whole blocks into chunks, the reader unpacks them straight into its pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from cluster.errors import TransferError

CHUNK_BYTES: Final = 2**20  # a chunk holds at least one block, however large
MAX_BLOCK_BYTES: Final = 32 * 2**20  # half of what a gRPC message may hold


def pack_chunks(pool: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """`(position in rows of the first block, bytes of whole blocks)`, read from `pool` when the chunk is asked for.

    Args:
        pool: uint8 `[num_blocks, block_bytes]`.
        rows: blocks of `pool`, in the order to send.
    """
    blocks = pool.numpy()
    step = max(1, CHUNK_BYTES // pool.shape[1])
    for start in range(0, len(rows), step):
        yield start, b"".join(blocks[row].data for row in rows[start : start + step])


class ChunkWriter:
    """Puts arriving chunks into rows of a pool. They must come in order and cover every row exactly once."""

    def __init__(self, destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        """`destination` is uint8 `[num_blocks, block_bytes]`; `block_ids` are its rows, in the order that was asked for."""
        self._blocks = destination.numpy()
        self._block_ids = block_ids
        self._num_written = 0

    def write(self, index: int, data: bytes) -> None:
        """Raises:
        TransferError: the chunk is not the next one, holds a part of a block, or more than was asked for.
        """
        block_bytes = self._blocks.shape[1]
        num_blocks, rest = divmod(len(data), block_bytes)
        if index != self._num_written:
            raise TransferError(f"expected the chunk of block {self._num_written}, got that of block {index}")
        if rest or not num_blocks:
            raise TransferError(f"a chunk of {len(data)} bytes is not made of blocks of {block_bytes} bytes")
        if index + num_blocks > len(self._block_ids):
            raise TransferError(f"asked for {len(self._block_ids)} blocks, got {index + num_blocks}")
        arrived = np.frombuffer(data, dtype=np.uint8).reshape(num_blocks, block_bytes)
        for row, block in zip(self._block_ids[index : index + num_blocks], arrived, strict=True):
            self._blocks[row] = block
        self._num_written += num_blocks

    def finish(self) -> None:
        """Raises:
        TransferError: blocks are missing.
        """
        if self._num_written != len(self._block_ids):
            raise TransferError(f"asked for {len(self._block_ids)} blocks, got {self._num_written}")
