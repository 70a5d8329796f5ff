"""One benchmark on an open transport: warm-up, then one run, or the runs of a search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.load.answer import LoadError
from benchmarks.load.driver import Budget, ClosedLoop, Driver, LoadResult
from benchmarks.load.live import LiveReport
from benchmarks.load.plan import Plan
from benchmarks.load.search import Probe, RateSearch, SearchResult
from benchmarks.load.slo import Slo
from benchmarks.load.transport import Transport
from benchmarks.report import progress


@dataclass(frozen=True, slots=True)
class Found:
    """The run that the figures are of; after a search, the one at the highest rate that attained, or the last.

    `interrupted` says that the benchmark was cancelled: then it is what there is of the run, and of a search the best run so far.
    """

    model: str
    result: LoadResult
    rate: float | None
    num_sent: int  # by all runs together
    search: SearchResult | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    result: LoadResult
    rate: float | None


class Session:
    """`run` once."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self._transport, self._plan = transport, plan
        self._model = ""
        # All runs go on in one stream of requests: a prompt that came again would be known to the server's prefix cache.
        self._requests = plan.source.requests(plan.seed)
        self._drivers: list[Driver] = []  # one a run
        self._best: _Run | None = None
        self._search: RateSearch | None = None
        self._probes: list[Probe] = []

    async def run(self, model: str | None) -> Found:
        """Asks the server for its model unless one is given. Cancelled once, it ends early with what there is.

        Raises:
            LoadError: the server does not say its model, or answered no request of the warm-up.
        """
        try:
            async with self._transport:
                self._model = model or await self._transport.find_model()
                await self._warm_up()
                await self._measure()
        except asyncio.CancelledError:
            if not self._drivers:
                raise
            if task := asyncio.current_task():
                task.uncancel()
            return self._found(interrupted=True)
        return self._found()

    async def _measure(self) -> None:
        if self._plan.search and self._plan.slo:
            await self._find_rate(self._plan.slo)
        else:
            self._best = _Run(await self._load(self._plan.rate), self._plan.rate)

    def _found(self, *, interrupted: bool = False) -> Found:
        best = self._best or _Run(self._drivers[0].result(), self._search.next_rate() if self._search else self._plan.rate)
        search = SearchResult.of(self._search, self._plan.attain, self._probes) if self._search and self._probes else None
        return Found(self._model, best.result, best.rate, sum(driver.num_sent for driver in self._drivers), search, interrupted)

    async def _warm_up(self) -> None:
        """First steps allocate, pack and connect; a warm server is what the figures are of."""
        num_requests = self._plan.num_warm_up
        if num_requests == 0:
            return
        progress(f"warm-up: {num_requests} requests to {self._model}")
        driver = Driver(self._transport, self._model)
        result = await driver.run(self._plan.source.warm_up(self._plan.seed), ClosedLoop(num_requests), Budget(num_requests))
        if not result.answered:
            first = result.traces[0]
            raise LoadError(first.error_kind or "", f"no request of the warm-up was answered: {first.error}")

    async def _load(self, rate: float | None) -> LoadResult:
        driver = Driver(self._transport, self._model)
        self._drivers.append(driver)
        async with _reported(driver, self._plan.progress_interval_s):
            return await driver.run(self._requests, self._plan.pace(rate), self._plan.budget)

    async def _find_rate(self, slo: Slo) -> None:
        self._search = search = RateSearch(self._plan.rate or 1.0, self._plan.precision)
        while (rate := search.next_rate()) is not None:
            result = await self._load(rate)
            attainment = slo.attainment(result.traces)
            attained = attainment >= self._plan.attain
            progress(f"{rate:.3f} requests/s: {attainment:.1%} within the SLOs, {'attained' if attained else 'missed'}")
            search.tell(rate, attained)
            self._probes.append(Probe(round(rate, 4), round(attainment, 4)))
            if attained or not search.highest_attained:
                self._best = _Run(result, rate)


@asynccontextmanager
async def _reported(driver: Driver, interval_s: float) -> AsyncIterator[None]:
    reporter = asyncio.create_task(LiveReport(driver).run(interval_s))
    try:
        yield
    finally:
        reporter.cancel()
