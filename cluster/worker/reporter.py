"""Tells the router what the worker holds: every half second, and at once when something changed.

The router rebuilds everything it knows of the workers from these reports, so one that restarts needs no other memory. Serving never
waits for it: while the router is gone, reports are tried again with growing pauses, and requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from cluster import wire
from cluster.types import ReportReply, WorkerLoad

_log = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5
_MIN_GAP_S: Final = 0.02  # changes within this gather in one report
_SEND_TIMEOUT_S: Final = 2.0
_MAX_PAUSE_S: Final = 4.0

Send = Callable[[bytes], Awaitable[bytes]]


class LoadReporter:
    """Sends `WorkerLoad`s, one at a time, over `send` (msgpack in, `ReportReply` out)."""

    def __init__(
        self, load: Callable[[], Awaitable[WorkerLoad]], send: Send, learn_epoch: Callable[[int], None], interval_s: float = INTERVAL_S
    ) -> None:
        self._load = load
        self._send = send
        self._learn_epoch = learn_epoch
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None
        self._task = asyncio.create_task(self._run(), name="load-reporter")

    def wake(self) -> None:
        """Something changed: a report follows at once. Call it on the event loop."""
        self._changed.set()

    async def report(self) -> bool:
        """One report now. Whether the router took it; never raises, and gives up after two seconds."""
        async with self._sending:
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    reply = wire.decode(ReportReply, await self._send(wire.encode(await self._load())))
            except Exception as error:  # whatever the carrier raises, the worker goes on serving
                _log.warning("the router did not take a load report: %s: %s", type(error).__name__, error)
                return False
            self._learn_epoch(reply.router_epoch)
            return True

    async def stop(self) -> None:
        """No report follows. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _run(self) -> None:
        num_failures = 0
        while True:
            self._changed.clear()
            if await self.report():
                num_failures = 0
                await asyncio.sleep(_MIN_GAP_S)
                await self._wait_for_change()
            else:
                num_failures += 1
                await asyncio.sleep(min(self._interval_s * 2 ** (num_failures - 1), _MAX_PAUSE_S))

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._changed.wait()
