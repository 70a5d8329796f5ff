"""What long prompts do to 8 running streams: their p99 ITL while requests of 1,024 in, 16 out come back to back, and without them."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Final

from benchmarks.comparison.alternation import Outcome, alternate
from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.figures import reasons, record
from benchmarks.comparison.server_choice import server_choice
from benchmarks.comparison.servers import COLOCATED, DISAGGREGATED, Start
from benchmarks.comparison.streams import Interference, measure_interference
from benchmarks.load.answer import LoadError
from benchmarks.report import progress, publish, table

_NUM_ROUNDS: Final = 3
_CLUSTERS: Final = (DISAGGREGATED, COLOCATED)


def run(options: argparse.Namespace) -> bool:
    """Prints and keeps the result; whether everyone has all figures.

    Raises:
        ConfigError: the config or the model is wrong.
    """
    choice = server_choice(options, _CLUSTERS)
    rounds = _Rounds(choice.starts, options.seed, options.seconds)
    outcome = alternate(choice.names, options.rounds or _NUM_ROUNDS, rounds.ratio)
    print(_table(choice.names, rounds.found, outcome))
    outcomes = {"interference": outcome}
    missing = reasons(outcomes, {})
    print("\n".join(missing))
    found = {name: [asdict(each) for each in taken] for name, taken in rounds.found.items()}
    settings = {"part": "interference", **choice.settings, "seconds": options.seconds, "found": found}
    publish("peers", {**settings, **record(outcomes, choice.names, [], {})}, options.results)
    return not missing


@dataclass(slots=True)
class _Rounds:
    starts: dict[str, Start]
    seed: int
    seconds_s: float
    found: dict[str, list[Interference]] = field(default_factory=lambda: defaultdict(list))  # by server

    def ratio(self, name: str, index: int) -> float:
        """p99 ITL with the prompts over the same without, on a server started for it."""
        with self.starts[name]() as url:
            try:
                found = asyncio.run(measure_interference(url, self.seconds_s, self.seed + index))
            except LoadError as error:
                raise PeerError(f"{error.kind}: {error}") from error
        self.found[name].append(found)
        progress(f"{name}, round {index + 1}: {found}")
        return found.ratio


def _table(names: list[str], found: dict[str, list[Interference]], outcome: Outcome) -> str:
    header = ["who", "p50 ITL without / with", "p99 ITL without / with", "p99: with / without", "long prompts/s"]
    return table(header, [_row(name, found.get(name, []), outcome) for name in names])


def _row(name: str, taken: list[Interference], outcome: Outcome) -> list[str]:
    if not taken:
        return [name, "failed", "-", "-", "-"]
    ratios = [figures[name] for figures in outcome.rounds if name in figures]
    return [
        name,
        f"{_ms([each.quiet_p50_s for each in taken])} / {_ms([each.busy_p50_s for each in taken])}",
        f"{_ms([each.quiet_p99_s for each in taken])} / {_ms([each.busy_p99_s for each in taken])}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{statistics.median(each.num_prompts / each.busy_s for each in taken):.2f}",
    ]


def _ms(values_s: list[float]) -> str:
    return f"{statistics.median(values_s) * 1e3:.1f} ms"
