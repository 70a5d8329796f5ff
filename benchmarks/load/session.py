"""One benchmark on an open transport: warm-up, then one run, or the runs of a search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.load.answer import LoadError
from benchmarks.load.driver import Budget, ClosedLoop, Driver, LoadResult, Pace
from benchmarks.load.live import LiveReport
from benchmarks.load.plan import Plan
from benchmarks.load.search import RateSearch
from benchmarks.load.slo import Slo
from benchmarks.load.transport import Transport
from benchmarks.report import progress


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of a search."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`highest_rate` is 0 when no rate attained; `settled` is False when the probes ended before the precision was reached."""

    attain: float
    highest_rate: float
    settled: bool
    probes: tuple[Probe, ...]

    def __str__(self) -> str:
        if not self.highest_rate:
            return f"no rate that was tried attains {self.attain:.0%} (lowest: {min(probe.rate for probe in self.probes):.3f} requests/s)"
        bound = "" if self.settled else "at least "
        return f"highest rate that attains {self.attain:.0%}: {bound}{self.highest_rate:.3f} requests/s, after {len(self.probes)} runs"


@dataclass(frozen=True, slots=True)
class Found:
    """The run that the figures are of; after a search, the one at the highest rate that attained, or the last."""

    model: str
    result: LoadResult
    rate: float | None
    search: SearchResult | None = None


class Session:
    """`run` once."""

    def __init__(self, transport: Transport, plan: Plan) -> None:
        self._transport, self._plan = transport, plan

    async def run(self, model: str | None) -> Found:
        """Asks the server for its model unless one is given.

        Raises:
            LoadError: the server does not say its model, or answered no request of the warm-up.
        """
        async with self._transport as transport:
            model = model or await transport.find_model()
            await self._warm_up(model)
            if self._plan.search and self._plan.slo:
                return await self._search(model, self._plan.slo)
            return Found(model, await self._load(model, self._plan.rate, self._plan.seed), self._plan.rate)

    async def _warm_up(self, model: str) -> None:
        """First steps allocate, pack and connect; a warm server is what the figures are of."""
        num_requests = self._plan.num_warm_up
        if num_requests == 0:
            return
        progress(f"warm-up: {num_requests} requests to {model}")
        driver = Driver(self._transport, model)
        requests = self._plan.source.requests(self._plan.seed - 1)
        result = await driver.run(requests, ClosedLoop(num_requests), Budget(num_requests))
        if not result.answered:
            first = result.traces[0]
            raise LoadError(first.error_kind or "", f"no request of the warm-up was answered: {first.error}")

    async def _load(self, model: str, rate: float | None, prompt_seed: int) -> LoadResult:
        driver = Driver(self._transport, model)
        pace: Pace = self._plan.pace(rate)
        async with _reported(driver, self._plan.progress_interval_s):
            return await driver.run(self._plan.source.requests(prompt_seed), pace, self._plan.budget)

    async def _search(self, model: str, slo: Slo) -> Found:
        search = RateSearch(self._plan.rate or 1.0, self._plan.precision)
        probes: list[Probe] = []
        best: Found | None = None
        while (rate := search.next_rate()) is not None:
            # Other prompts each time, or the server's prefix cache would know those of the run before.
            result = await self._load(model, rate, self._plan.seed + len(probes))
            attainment = slo.attainment(result.traces)
            attained = attainment >= self._plan.attain
            progress(f"{rate:.3f} requests/s: {attainment:.1%} within the SLOs, {'attained' if attained else 'missed'}")
            search.tell(rate, attained)
            probes.append(Probe(round(rate, 4), round(attainment, 4)))
            if attained or not search.highest_attained:
                best = Found(model, result, rate)
        assert best, "a search has at least one probe"
        found = SearchResult(self._plan.attain, round(search.highest_attained, 4), search.is_settled, tuple(probes))
        return Found(model, best.result, best.rate, found)


@asynccontextmanager
async def _reported(driver: Driver, interval_s: float) -> AsyncIterator[None]:
    reporter = asyncio.create_task(LiveReport(driver).run(interval_s))
    try:
        yield
    finally:
        reporter.cancel()
