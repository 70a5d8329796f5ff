"""Sends a soak's traffic by the clock, cancels what is to be cancelled, and counts. Holds nothing of a request that is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.endurance.senders import Send
from benchmarks.endurance.traffic import Kind, SoakRequest
from benchmarks.load.answer import LoadError
from benchmarks.load.arrivals import Poisson
from benchmarks.load.driver import Clock


@dataclass(slots=True)
class Counts:
    """What became of the requests so far."""

    num_sent: int = 0
    num_running: int = 0
    answered: Counter[Kind] = field(default_factory=Counter)
    cancelled: Counter[Kind] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # by kind of request and of error
    first_errors: dict[str, str] = field(default_factory=dict)

    @property
    def num_answered(self) -> int:
        """Mistakes that were refused count."""
        return self.answered.total()


class SoakLoad:
    """`counts` may be read while it runs."""

    def __init__(self, sends: Mapping[Kind, Send]) -> None:
        self.counts = Counts()
        self._sends = sends

    async def open_loop(self, requests: Iterator[SoakRequest], rate: float, seed: int, duration_s: float) -> None:
        """Sends `rate` requests/s for `duration_s`, however slow the answers are, and waits for the last."""
        clock = Clock()
        async with asyncio.TaskGroup() as group:
            for request, at_s in zip(requests, Poisson(rate).times_s(seed), strict=False):
                if at_s > duration_s:
                    return
                await asyncio.sleep(at_s - clock.now_s())
                group.create_task(self._ask(request))

    async def closed_loop(self, requests: Iterator[SoakRequest], concurrency: int, duration_s: float) -> float:
        """Keeps `concurrency` requests running for `duration_s`; how many a second were over."""
        clock = Clock()

        async def user() -> None:
            while clock.now_s() < duration_s:
                await self._ask(next(requests))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
        return self.counts.num_sent / clock.now_s()

    async def _ask(self, asked: SoakRequest) -> None:
        counts = self.counts
        counts.num_sent += 1
        counts.num_running += 1
        try:
            async with asyncio.timeout(asked.cancel_after_s) as limit:
                await self._sends[asked.kind](asked)
            counts.answered[asked.kind] += 1
        except TimeoutError:
            if not limit.expired():
                raise
            counts.cancelled[asked.kind] += 1
        except LoadError as error:
            kind = f"{asked.kind}: {error.kind}"
            counts.errors[kind] += 1
            counts.first_errors.setdefault(kind, str(error))
        finally:
            counts.num_running -= 1
