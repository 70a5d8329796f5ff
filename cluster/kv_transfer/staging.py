"""Memory that foreign blocks are read into before they are repacked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import torch

_MAX_PARTS: Final = 4  # handoffs that use it at the same time


class StagingArea:
    """A few equal parts, each in one handoff's hands at a time; who comes first is served first. Use it on one event loop.

    `blocks` stays the same tensor for good, so that a data plane may register it once.
    """

    def __init__(self, block_bytes: int, num_bytes: int, *, multiple: int) -> None:
        """
        Args:
            block_bytes: of one foreign block.
            num_bytes: of the area; one part is made in any case.
            multiple: of how many blocks a part must be.
        """
        unit_bytes = multiple * block_bytes
        num_parts = max(1, min(_MAX_PARTS, num_bytes // unit_bytes))
        self.part_rows = max(1, num_bytes // (num_parts * unit_bytes)) * multiple
        self.blocks = torch.empty(num_parts * self.part_rows, block_bytes, dtype=torch.uint8)  # [num_rows, block_bytes]
        self._free = list(range(0, len(self.blocks), self.part_rows))
        self._turns = asyncio.Semaphore(num_parts)

    @asynccontextmanager
    async def part(self) -> AsyncIterator[int]:
        """The first row of a part that is the caller's within the context; waits while all are taken."""
        async with self._turns:
            row = self._free.pop()
            try:
                yield row
            finally:
                self._free.append(row)
