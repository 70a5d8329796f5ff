"""An event loop whose time stands still until the test moves it, so that a test decides what happens before what."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from contextvars import Context
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never waits: it runs what is ready, and timers only in `advance`. Everything must run in the test's own thread."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._num_scheduled = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self.faults: list[dict[str, Any]] = []
        super().__init__()
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        self._num_scheduled += 1
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        self._num_scheduled += 1
        return super().call_soon(callback, *args, context=context)  # there is no other thread that would have to wake us

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = super().call_at(when, callback, *args, context=context)
        self._num_scheduled += 1
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def settle(self) -> None:
        """Runs until nothing more happens at this instant."""
        num_before = -1
        while self._num_scheduled != num_before:
            num_before = self._num_scheduled
            super().call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        """Moves time on, from timer to timer."""
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            when_s, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled() and when_s > self._now_s:
                self._now_s = when_s
                self.settle()
        self._now_s = end_s
        self.settle()

    def jump(self, seconds: float) -> None:
        """Moves time on past timers that have not fired yet, as on a loop that was busy: what is ready now comes before them."""
        self._now_s += seconds
