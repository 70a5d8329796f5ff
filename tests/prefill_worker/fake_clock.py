"""An event loop's clock that stands still until told otherwise."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from prefill_worker.outbox import LeaseEnd


@dataclass(order=True)
class FakeTimer:
    when_s: float
    order: int
    fire: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Timers fire in `advance`, at their own times; with `late` they do not fire at all, as on a loop that is busy."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[FakeTimer] = []
        self._order = itertools.count()
        self._loop = asyncio.new_event_loop()  # never runs; futures need one

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[str, bytes], None], key: str, nonce: bytes, /) -> FakeTimer:
        timer = FakeTimer(when, next(self._order), lambda: callback(key, nonce))
        heapq.heappush(self._timers, timer)
        return timer

    def create_future(self) -> asyncio.Future[LeaseEnd]:
        return self._loop.create_future()

    def advance(self, seconds: float, *, late: bool = False) -> None:
        end_s = self.now_s + seconds
        while not late and self._timers and self._timers[0].when_s <= end_s:
            timer = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, timer.when_s)
            if not timer.cancelled:
                timer.fire()
        self.now_s = end_s

    @property
    def num_timers(self) -> int:
        return sum(not timer.cancelled for timer in self._timers)

    def close(self) -> None:
        self._loop.close()
