"""Alternating runs: in each round everyone runs once, and ratios are taken within a round, of runs that are neighbours in time.

A shared machine's speed drifts by more than what is compared; neighbours drift together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.comparison.failure import PeerError
from benchmarks.report import progress


@dataclass(slots=True)
class Outcome:
    """One case: of each round, everyone's figure; and why somebody is missing."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """None for whom no round has a figure."""
        values = [figures[name] for figures in self.rounds if name in figures]
        return statistics.median(values) if values else None

    def ratios(self, name: str, base: str) -> list[float]:
        """`name` over `base`, of each round that has both."""
        return [figures[name] / figures[base] for figures in self.rounds if name in figures and figures.get(base)]

    def best(self, names: Sequence[str]) -> str | None:
        """Of `names`, the one with the highest median."""
        found = {name: value for name in names if (value := self.median(name)) is not None}
        return max(found, key=found.__getitem__, default=None)


def alternate(names: Sequence[str], num_rounds: int, measure: Callable[[str, int], float]) -> Outcome:
    """Runs `measure(name, round)` for everyone in each round; who fails is out of the rounds that follow.

    The order turns from round to round, so that nobody always has the warmer machine.
    """
    outcome = Outcome()
    for index in range(num_rounds):
        figures: dict[str, float] = {}
        for name in list(names)[:: -1 if index % 2 else 1]:
            if name in outcome.errors:
                continue
            try:
                figures[name] = measure(name, index)
            except PeerError as error:
                progress(f"{name}: {error}")
                outcome.errors[name] = str(error)
        outcome.rounds.append(figures)
    return outcome
