"""A thread for work on KV memory that must never be interrupted within a slice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from cluster.kv_transfer.outlast import outlast


class CopyThread:
    """One thread, since one core nearly fills the memory bus; handoffs share it slice by slice."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread and outlasts it, whatever happens to us meanwhile: memory is left alone once this has ended."""
        skip = Event()

        def unless_skipped() -> None:
            if not skip.is_set():
                work()

        await outlast(asyncio.get_running_loop().run_in_executor(self._executor, unless_skipped), skip.set)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._executor.shutdown()
