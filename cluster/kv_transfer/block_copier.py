"""Copies blocks between two pools in memory, in a thread of its own, without the GIL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Final

import torch

# What one call copies before it looks for a cancel: a few milliseconds, and one trip through the GIL.
_SLICE_BYTES: Final = 16 * 2**20


class BlockCopier:
    """One thread, since one core nearly fills the memory bus; reads share it slice by slice."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")

    async def copy(self, source: torch.Tensor, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies `source[rows[i]]` to `destination[block_ids[i]]`; both are uint8 `[blocks, block_bytes]`.

        A cancel takes effect between slices; the thread has left both pools when this returns or raises.
        """
        assert len(rows) == len(block_ids) and source.shape[1:] == destination.shape[1:]
        step = max(1, _SLICE_BYTES // destination.shape[1])
        for start in range(0, len(rows), step):
            end = start + step
            await self._run(lambda s=rows[start:end], d=block_ids[start:end]: _copy(source, s, destination, d))  # type: ignore[misc]

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown()

    async def _run(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread and outlasts it, whatever happens to us meanwhile."""
        skip = Event()

        def unless_skipped() -> None:
            if not skip.is_set():
                work()

        future = asyncio.get_running_loop().run_in_executor(self._thread, unless_skipped)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            skip.set()
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # a second cancel must not free rows that are still written
            future.exception()  # seen, and of no interest any more
            raise


def _copy(source: torch.Tensor, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
    # One call for all rows: it gives the GIL back once, where a copy for each row would queue for it each time.
    torch._foreach_copy_([destination[row] for row in block_ids], [source[row] for row in rows])
