"""Waiting for what happens in its own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0, interval_s: float = 0.002) -> None:
    """Waits for what other tasks, threads, processes or the kernel bring about, and of which no event tells us."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(interval_s)
