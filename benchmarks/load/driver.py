"""One run: sends requests at their pace, waits for every answer, and keeps what came back.

Life: `Driver.run` starts the clock → the pace calls `_ask` for each request → each becomes one `Trace`, failed or not → all are awaited.
Everything runs in one event loop, so one core is the generator's limit:
`LoadResult` says how much of it was used, and each trace how late it was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.arrivals import Arrivals
from benchmarks.load.requests import LoadRequest
from benchmarks.load.trace import INTERRUPTED, Trace
from benchmarks.load.transport import Transport

Ask = Callable[[LoadRequest, float], Coroutine[Any, Any, None]]  # a request, and when it was to be sent, seconds after the start


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run stops sending: what comes first."""

    num_requests: int
    duration_s: float = float("inf")

    def cut(self, requests: Iterator[LoadRequest]) -> Iterator[LoadRequest]:
        return islice(requests, self.num_requests)  # takes no more, so that another run may go on where this one ended


class Clock:
    """Seconds after the start of a run."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self.started_s


class Pace(Protocol):
    """When requests are sent."""

    async def drive(self, requests: Iterator[LoadRequest], ask: Ask, clock: Clock, duration_s: float) -> None:
        """Asks all `requests`, none later than `duration_s`; returns when all are answered."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """By the clock, however many answers are outstanding."""

    arrivals: Arrivals
    seed: int

    async def drive(self, requests: Iterator[LoadRequest], ask: Ask, clock: Clock, duration_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for request, scheduled_s in zip(requests, self.arrivals.times_s(self.seed), strict=False):
                if scheduled_s > duration_s:
                    return
                await asyncio.sleep(scheduled_s - clock.now_s())
                group.create_task(ask(request, scheduled_s))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, each of whom sends the next request as soon as the last one is answered."""

    concurrency: int

    async def drive(self, requests: Iterator[LoadRequest], ask: Ask, clock: Clock, duration_s: float) -> None:
        async def user() -> None:
            while clock.now_s() <= duration_s and (request := next(requests, None)):
                await ask(request, clock.now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(user())


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of one run, in the order in which they ended."""

    duration_s: float  # from the start to the last answer
    traces: tuple[Trace, ...]
    cpu_share: float = 0.0  # of one core, used by this process

    @property
    def answered(self) -> list[Trace]:
        return [trace for trace in self.traces if trace.answered]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(trace.num_output_tokens for trace in self.answered) / self.duration_s


class Driver:
    """Runs one load on one model. `num_sent` and `traces` may be read while it runs."""

    def __init__(self, transport: Transport, model: str, on_trace: Callable[[Trace], None] = lambda trace: None) -> None:
        self.num_sent = 0
        self.traces: list[Trace] = []
        self.clock = Clock()
        self._cpu_started_s = time.process_time()
        self._transport, self._model, self._on_trace = transport, model, on_trace

    async def run(self, requests: Iterator[LoadRequest], pace: Pace, budget: Budget) -> LoadResult:
        """Sends until the budget is spent and waits for every answer; failures become traces.

        Cancelled, it cancels what is open, whose traces are of kind `interrupted`; `result` then has what there is.
        """
        self.clock = Clock()
        self._cpu_started_s = time.process_time()
        await pace.drive(budget.cut(requests), self._ask, self.clock, budget.duration_s)
        return self.result()

    def result(self) -> LoadResult:
        """What came back until now."""
        duration_s = self.clock.now_s()
        return LoadResult(duration_s, tuple(self.traces), (time.process_time() - self._cpu_started_s) / duration_s)

    async def _ask(self, request: LoadRequest, scheduled_s: float) -> None:
        self.num_sent += 1
        answer = Answer(self.clock.started_s)
        trace = Trace(scheduled_s, self.clock.now_s(), ended_s=0.0)
        try:
            await self._transport.send(request, self._model, answer)
        except LoadError as error:
            trace = replace(trace, error_kind=error.kind, error=str(error))
        except asyncio.CancelledError:
            self._keep(replace(trace, error_kind=INTERRUPTED, error="open when the load generator was stopped"), answer)
            raise
        self._keep(trace, answer)

    def _keep(self, trace: Trace, answer: Answer) -> None:
        trace = _completed(trace, answer, self.clock.now_s())
        self.traces.append(trace)
        self._on_trace(trace)


def _completed(trace: Trace, answer: Answer, now_s: float) -> Trace:
    """`trace` with what came back. A failed request ended when it failed, and not with what it had got."""
    num_counted = sum(1 if chunk.num_tokens is None else chunk.num_tokens for chunk in answer.chunks)
    return replace(
        trace,
        ended_s=now_s if answer.finished_s is None or not trace.answered else answer.finished_s,
        chunks=tuple(answer.chunks),
        num_prompt_tokens=answer.num_prompt_tokens or 0,
        num_output_tokens=num_counted if answer.num_output_tokens is None else answer.num_output_tokens,
    )
