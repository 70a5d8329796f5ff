"""Hears from a prefill worker how far a prompt is computed, while its first blocks are being read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from cluster.errors import TransferError
from cluster.kv_transfer.base import Progress


class Follower:
    """Of marks that come during a read the last one counts. Use it as an async context manager."""

    def __init__(self, marks: AsyncGenerator[Progress, None]) -> None:
        """`marks` is what `KVControlClient.follow` gives."""
        self._marks = marks
        self._news: Progress | None = None
        self._changed = asyncio.Event()
        self.completed_s = 0.0  # `time.monotonic()` when the complete ticket came, which may be before it was read here

    async def __aenter__(self) -> Follower:
        self._task = asyncio.create_task(self._follow())
        self._task.add_done_callback(lambda _task: self._changed.set())
        return self

    async def __aexit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # an error that nobody was waiting for

    async def next(self) -> Progress:
        """The latest progress that was not returned yet; waits for it.

        Raises:
            TransferError: the prefill worker ended the stream without the complete ticket.
            BatonError: as `KVControlClient.follow`.
        """
        while self._news is None:
            if self._task.done():
                self._task.result()
                raise TransferError("the prefill worker ended its progress without a complete ticket")
            self._changed.clear()
            await self._changed.wait()
        news, self._news = self._news, None
        return news

    async def _follow(self) -> None:
        async with aclosing(self._marks) as marks:
            async for progress in marks:
                if progress.ticket is not None:
                    self.completed_s = time.monotonic()
                self._news = progress
                self._changed.set()
