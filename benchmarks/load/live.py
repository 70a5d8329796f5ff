"""What is said while a run goes on."""

from __future__ import annotations

import asyncio

from benchmarks.load.driver import Driver
from benchmarks.load.statistics import percentile
from benchmarks.report import progress


async def report_progress(driver: Driver, interval_s: float) -> None:
    """A line on stderr every `interval_s`, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        progress(describe(driver))


def describe(driver: Driver) -> str:
    """Counts so far, and the median TTFT of what was answered."""
    answered = [trace for trace in driver.traces if trace.answered]
    num_failed = len(driver.traces) - len(answered)
    parts = [
        f"{driver.clock.now_s():.0f} s: {driver.num_sent} sent",
        f"{driver.num_sent - len(driver.traces)} running",
        f"{len(answered)} answered",
        *([f"{num_failed} failed"] if num_failed else []),
        *([f"TTFT p50 {percentile([trace.ttft_s for trace in answered], 0.5):.3f} s"] if answered else []),
    ]
    return ", ".join(parts)
