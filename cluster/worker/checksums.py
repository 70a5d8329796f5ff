"""CRC-32 of KV blocks: a debugging aid that tells a block damaged on its way from one that was computed wrong."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import torch


async def block_checksums(pool: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
    """CRC-32 of each of `block_ids`; computed off the event loop.

    Args:
        pool: uint8 `[num_blocks, block_bytes]`, in host memory.
        block_ids: rows of `pool`.
    """
    return await asyncio.to_thread(_checksums, pool, block_ids)


def _checksums(pool: torch.Tensor, block_ids: Sequence[int]) -> tuple[int, ...]:
    rows = pool.numpy()
    return tuple(zlib.crc32(rows[block_id]) for block_id in block_ids)
