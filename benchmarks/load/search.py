"""Finds the highest rate that still attains the SLOs: doubles (or halves) until it lies between two rates, then bisects.

It knows rates and verdicts alone; who measures them calls `next_rate` and `tell` in turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RateSearch:
    """`highest_attained` (0: none) and `lowest_missed` (infinite: none) close in on the limit until they differ by `precision` or less."""

    first_rate: float  # requests/s
    precision: float = 0.05  # relative
    max_probes: int = 12
    highest_attained: float = 0.0
    lowest_missed: float = math.inf
    num_probes: int = 0

    def next_rate(self) -> float | None:
        """The rate to try now; None when the search is over."""
        if self.num_probes >= self.max_probes or self.is_settled:
            return None
        if self.num_probes == 0:
            return self.first_rate
        if self.lowest_missed == math.inf:
            return self.highest_attained * 2
        if self.highest_attained == 0:
            return self.lowest_missed / 2
        return math.sqrt(self.highest_attained * self.lowest_missed)

    def tell(self, rate: float, attained: bool) -> None:
        """What `rate`, which `next_rate` gave, turned out to be."""
        self.num_probes += 1
        if attained:
            self.highest_attained = max(self.highest_attained, rate)
        else:
            self.lowest_missed = min(self.lowest_missed, rate)

    @property
    def is_settled(self) -> bool:
        """The limit is known to the precision, both from above and from below."""
        return self.highest_attained > 0 and self.lowest_missed <= self.highest_attained * (1 + self.precision)


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

    @classmethod
    def of(cls, search: RateSearch, attain: float, probes: Sequence[Probe]) -> SearchResult:
        """`probes` are the runs that ended, at least one."""
        return cls(attain, round(search.highest_attained, 4), search.is_settled, tuple(probes))

    def __str__(self) -> str:
        if not self.highest_rate:
            return f"no rate that was tried attains {self.attain:.0%} (lowest: {min(probe.rate for probe in self.probes):.3f} requests/s)"
        bound = "" if self.settled else "at least "
        return f"highest rate that attains {self.attain:.0%}: {bound}{self.highest_rate:.3f} requests/s, after {len(self.probes)} runs"
