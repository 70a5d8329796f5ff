"""Clusters against `vllm serve`, both asked by `baton bench`'s client: the highest rate at which 90 % of requests are within the SLOs."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.comparison.alternation import alternate
from benchmarks.comparison.cases import VOCAB_SIZE
from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.figures import ratio_table, reasons, record
from benchmarks.comparison.rate_grid import RateGrid
from benchmarks.comparison.server_choice import server_choice
from benchmarks.comparison.servers import COLOCATED, DISAGGREGATED, Start
from benchmarks.load.answer import LoadError
from benchmarks.load.driver import Budget
from benchmarks.load.http import HttpTarget, HttpTransport
from benchmarks.load.lengths import Fixed
from benchmarks.load.plan import Plan
from benchmarks.load.requests import RandomTokens
from benchmarks.load.session import Found, Session
from benchmarks.load.slo import Slo
from benchmarks.report import progress, publish
from cluster.errors import ConfigError

SLO: Final = Slo(ttft_s=2.0, tpot_s=0.05)
_GRID: Final = 0.1  # requests/s
_FIRST_STEP: Final = 5
_ATTAIN: Final = 0.9
_SEED_STRIDE: Final = 1000  # between seeds: each step of the grid has prompts and arrivals of its own within it
_NUM_SEEDS: Final = 3
_NUM_WARM_UP: Final = 2
_PROGRESS_S: Final = 30.0
_CLUSTERS: Final = (DISAGGREGATED, COLOCATED)


def run(options: argparse.Namespace) -> bool:
    """Prints and keeps the result; whether everyone has all figures.

    Raises:
        ConfigError: the config or the model is wrong, or `--first-rate` names nobody.
    """
    choice = server_choice(options, _CLUSTERS)
    first_steps = {name: round(rate / _GRID) or 1 for name, rate in options.first_rate}
    if unknown := first_steps.keys() - choice.names:
        raise ConfigError(f"--first-rate: nobody is called {min(unknown)!r}; {', '.join(choice.names)} are", param="--first-rate")
    goodput = _Goodput(choice.starts, options.seed, options.requests, first_steps)
    outcome = alternate(choice.names, options.rounds or _NUM_SEEDS, goodput.highest_rate)
    outcomes = {"goodput": outcome}
    print(ratio_table(outcomes, choice.names, choice.peers, "requests/s"))
    missing = reasons(outcomes, {})
    print("\n".join(missing))
    load = {
        "requests": options.requests,
        "slo": {name: bound for name, bound in asdict(SLO).items() if bound},
        "attain": _ATTAIN,
        "grid": _GRID,
    }
    settings = {"part": "goodput", **choice.settings, "load": load, "probes": goodput.probes}
    publish("peers", {**settings, **record(outcomes, choice.names, choice.peers, {})}, options.results)
    return not missing


@dataclass(slots=True)
class _Goodput:
    starts: dict[str, Start]
    seed: int
    num_requests: int
    first_steps: dict[str, int]  # by server, where the options say one
    probes: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))  # by server

    def highest_rate(self, name: str, index: int) -> float:
        """For one seed, requests/s; 0 when the lowest of the grid misses. A search begins where the one before ended."""
        known = [probe["rate"] for probe in self.probes[name] if probe["attained"] and probe["seed"] == index - 1]
        grid = RateGrid(round(max(known) / _GRID) if known else self.first_steps.get(name, _FIRST_STEP))
        with self.starts[name]() as url:
            while (step := grid.next_step()) is not None:
                grid.tell(step, self._attains(name, url, step, index))
        progress(f"{name}, seed {index + 1}: {grid.highest_attained * _GRID:.1f} requests/s")
        return grid.highest_attained * _GRID

    def _attains(self, name: str, url: str, step: int, index: int) -> bool:
        rate = step * _GRID
        found = self._load(url, rate, self.seed + index * _SEED_STRIDE + step)
        attainment = SLO.attainment(found.result.traces)
        attained = attainment >= _ATTAIN
        medians = {key: statistics.median(values) for key, values in _latencies(found).items() if values}
        self.probes[name].append(
            {"seed": index, "rate": round(rate, 1), "attainment": round(attainment, 4), "attained": attained, **medians}
        )
        progress(f"{name}, seed {index + 1}: {rate:.1f} requests/s, {attainment:.1%} within the SLOs")
        return attained

    def _load(self, url: str, rate: float, seed: int) -> Found:
        plan = Plan(
            source=RandomTokens(Fixed(512), Fixed(64), VOCAB_SIZE),
            budget=Budget(self.num_requests),
            rate=rate,
            burst=1,
            concurrency=1,
            seed=seed,
            num_warm_up=_NUM_WARM_UP,
            slo=SLO,
            search=False,
            attain=_ATTAIN,
            precision=_GRID,
            progress_interval_s=_PROGRESS_S,
        )
        try:
            found = asyncio.run(Session(HttpTransport(HttpTarget(url)), plan).run(None))
        except LoadError as error:
            raise PeerError(f"{error.kind}: {error}") from error
        if found.interrupted:
            raise KeyboardInterrupt  # which the session took; half a run is no verdict on its rate
        return found


def _latencies(found: Found) -> dict[str, list[float]]:
    answered = found.result.answered
    return {
        "ttft_p50_s": [round(trace.ttft_s, 4) for trace in answered],
        "tpot_p50_s": [round(trace.tpot_s, 4) for trace in answered if trace.tpot_s is not None],
    }
