"""One soak: capacity, load and samples side by side, the books in the end. Ctrl-C ends the load early, and the figures are of what was."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.endurance.books import await_balance
from benchmarks.endurance.load import Counts, SoakLoad
from benchmarks.endurance.sampler import Columns, History, Sampler
from benchmarks.endurance.senders import Send, senders
from benchmarks.endurance.target import Target
from benchmarks.endurance.traffic import Kind, Traffic
from benchmarks.load.driver import Clock
from benchmarks.report import progress
from deploy.process_tree import process_id

_CAPACITY_USERS = 8
_CAPACITY_S = 40.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a soak found; `warm_up_s` counts from the start of the load, as the histories' times do."""

    rate: float
    capacity: float | None
    duration_s: float
    counts: Counts
    histories: list[History]
    num_running: Columns  # requests, over time
    left: list[str]  # what the doctor finds in the end
    idle: list[History]  # without requests, after that; empty unless asked for
    interrupted: bool


class SoakSession:
    """`run` once."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self._target, self._options = target, options
        own = process_id(os.getpid())
        assert own is not None
        self._sampler, self._idle_sampler = (Sampler(target.root, (own,)) for _ in range(2))
        self._num_running = Columns("num_running")
        self._traffic = Traffic(
            options.input_tokens, options.output_tokens, options.vocab_size, options.cancel_share, grpc=target.grpc_target is not None
        )

    async def run(self) -> Soaked:
        """
        Raises:
            LoadError: the server does not say its model.
        """
        options = self._options
        async with senders(self._target.url, self._target.grpc_target) as sends:
            capacity = None if options.rate else await self._capacity(sends)
            rate = options.rate or (capacity or 0.0) * options.load_share
            load, clock = SoakLoad(sends), Clock()
            progress(f"{rate:.2f} requests/s for {options.duration:.0f} s, the first {options.warm_up:.0f} s not judged")
            interrupted = False
            async with (
                _every(options.sample_interval, lambda: self._sample(clock.now_s(), load.counts)),
                _every(options.progress_interval, lambda: progress(self._line(clock, load.counts))),
            ):
                try:
                    await load.open_loop(self._traffic.requests(options.seed), rate, options.seed, options.duration)
                except asyncio.CancelledError:
                    interrupted = True
            duration_s = clock.now_s()
        left = await await_balance(self._target.url)
        try:
            if options.idle and not interrupted:
                await self._idle(options.idle)
        except asyncio.CancelledError:
            interrupted = True
        histories, idle = self._sampler.histories, self._idle_sampler.histories
        return Soaked(rate, capacity, duration_s, load.counts, histories, self._num_running, left, idle, interrupted)

    async def _idle(self, duration_s: float) -> None:
        """The control: what grows now grows by time, not by requests."""
        progress(f"idle for {duration_s:.0f} s")
        clock = Clock()
        async with _every(self._options.sample_interval, lambda: self._idle_sampler.sample(clock.now_s())):
            await asyncio.sleep(duration_s)

    def _sample(self, time_s: float, counts: Counts) -> None:
        self._num_running.add(time_s, counts.num_running)
        self._sampler.sample(time_s)

    async def _capacity(self, sends: dict[Kind, Send]) -> float:
        progress(f"capacity: {_CAPACITY_USERS} users for {_CAPACITY_S:.0f} s")
        load = SoakLoad(sends)
        found = await load.closed_loop(self._traffic.requests(self._options.seed - 1), _CAPACITY_USERS, _CAPACITY_S)
        progress(f"capacity: {found:.2f} requests/s")
        return found

    def _line(self, clock: Clock, counts: Counts) -> str:
        memory = ", ".join(
            f"{history.role} {history.columns['anonymous_bytes'][-1] / _MIB:.0f}"
            for history in self._sampler.histories
            if history.is_replica and len(history)
        )
        return (
            f"{clock.now_s():.0f} s: {counts.num_sent} sent, {counts.num_running} running, {counts.num_answered} answered, "
            f"{counts.cancelled.total()} cancelled, {counts.errors.total()} failed; anonymous MiB: {memory}"
        )


@asynccontextmanager
async def _every(interval_s: float, act: Callable[[], None]) -> AsyncIterator[None]:
    """`act` in a thread, every `interval_s` by the clock, until left."""

    async def loop() -> None:
        clock = Clock()
        for index in itertools.count():
            await asyncio.sleep(index * interval_s - clock.now_s())
            await asyncio.to_thread(act)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error
