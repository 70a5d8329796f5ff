"""Whether a run measured the server, or something else: the load generator itself, or the server's prefix cache."""

from __future__ import annotations

from typing import Final

from benchmarks.load.requests import RecordedRequests, RequestSource
from benchmarks.load.statistics import Summary

MAX_CPU_SHARE: Final = 0.8  # of one core: above it, events wait for the event loop
MAX_LAG_S: Final = 0.05


def warnings(summary: Summary) -> list[str]:
    """Why the figures may be the generator's own; empty when they are the server's."""
    found = []
    if summary.cpu_share > MAX_CPU_SHARE:
        found.append(f"the load generator used {summary.cpu_share:.0%} of a core: latencies hold its own delays")
    if summary.lag and summary.lag.p99_s > MAX_LAG_S:
        found.append(f"requests were sent up to {summary.lag.p99_s * 1e3:.0f} ms late (p99): the load was not the one asked for")
    return found


def repetitions(source: RequestSource, num_sent: int) -> list[str]:
    """Why prompts may have come from the server's prefix cache: `num_sent` requests were more than the dataset has."""
    if not isinstance(source, RecordedRequests) or num_sent <= len(source.recorded):
        return []
    again = f"{num_sent - len(source.recorded)} of {num_sent} prompts of the dataset were sent again"
    return [f"{again}: a prefix cache knows them, so TTFT is lower than for new ones"]
