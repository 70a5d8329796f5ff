"""What is said while a run goes on."""

from __future__ import annotations

import asyncio

from benchmarks.load.driver import Driver
from benchmarks.load.statistics import percentile
from benchmarks.report import progress


class LiveReport:
    """Says on stderr how a run goes on. Each line looks only at what ended since the line before, so a long run is not slowed by it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._num_seen = 0
        self._num_failed = 0

    async def run(self, interval_s: float) -> None:
        """A line every `interval_s`, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            progress(self.line())

    def line(self) -> str:
        """Counts so far, and the median TTFT and the output of what was answered since the last line."""
        driver = self._driver
        recent = driver.traces[self._num_seen :]
        answered = [trace for trace in recent if trace.answered]
        self._num_seen += len(recent)
        self._num_failed += len(recent) - len(answered)
        parts = [
            f"{driver.clock.now_s():.0f} s: {driver.num_sent} sent",
            f"{driver.num_sent - self._num_seen} running",
            f"{self._num_seen - self._num_failed} answered",
        ]
        if self._num_failed:
            parts.append(f"{self._num_failed} failed")
        if answered:
            parts.append(f"TTFT p50 {percentile([trace.ttft_s for trace in answered], 0.5):.3f} s of the last {len(answered)}")
        return ", ".join(parts)
