"""Copies blocks between two pools in memory, in a thread of its own, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from cluster.kv_transfer.copy_thread import CopyThread

# What one call copies before it looks for a cancel: a few milliseconds, and one trip through the GIL.
_SLICE_BYTES: Final = 16 * 2**20


class BlockCopier:
    """Reads of several handoffs share its thread slice by slice."""

    def __init__(self) -> None:
        self._thread = CopyThread("kv-copy")

    async def copy(self, source: torch.Tensor, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies `source[rows[i]]` to `destination[block_ids[i]]`; both are uint8 `[blocks, block_bytes]`.

        A cancel takes effect between slices; the thread has left both pools when this returns or raises.
        """
        assert len(rows) == len(block_ids) and source.shape[1:] == destination.shape[1:]
        step = max(1, _SLICE_BYTES // destination.shape[1])
        for start in range(0, len(rows), step):
            end = start + step
            await self._thread.run(lambda s=rows[start:end], d=block_ids[start:end]: _copy(source, s, destination, d))  # type: ignore[misc]

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.close()


def _copy(source: torch.Tensor, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
    # One call for all rows: it gives the GIL back once, where a copy for each row would queue for it each time.
    torch._foreach_copy_([destination[row] for row in block_ids], [source[row] for row in rows])
