"""Whole clusters over HTTP against library calls: 16 of (512 in, 64 out) at once, the same prompts for all."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.comparison.alternation import alternate
from benchmarks.comparison.cases import MIXED, VOCAB_SIZE
from benchmarks.comparison.contestants import LibrarySettings, loaded
from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.figures import ratio_table, reasons, record
from benchmarks.comparison.library_calls import LibraryCalls
from benchmarks.comparison.servers import COLOCATED, DISAGGREGATED, Cluster, Start, baton
from benchmarks.load.answer import LoadError
from benchmarks.mixed_load import MixedLoad, WrongAnswer
from benchmarks.report import progress, publish
from deploy.config_file import load_serve_file
from deploy.pull import resolve_model

_PEERS: Final = ("openvino", "vllm")
_NUM_ROUNDS: Final = 3
_CLUSTERS: Final = (
    DISAGGREGATED,
    Cluster("disaggregated 2+2", ("mode=disaggregated", "prefill.threads=2", "decode.threads=2")),
    COLOCATED,
)


def run(options: argparse.Namespace) -> bool:
    """Prints and keeps the result; whether everyone has all figures.

    Raises:
        ConfigError: the config or the model is wrong.
    """
    model = options.model or load_serve_file(options.config).config.model
    folder = resolve_model(model, progress)
    peers = _PEERS if options.peers is None else options.peers
    clusters = {f"baton {cluster.name}": cluster for cluster in options.cluster or _CLUSTERS}
    starts = {name: baton(cluster, options.config, model, options.port) for name, cluster in clusters.items()}
    names = [*starts, *peers]
    with loaded(peers, (), LibrarySettings(folder, options.threads, options.dtype, options.config)) as libraries:
        calls = LibraryCalls(libraries.runners, options.seed)
        mixed = _Mixed(calls, starts, options.seed, options.runs)
        failed = calls.warm_up(MIXED, list(libraries.runners))
        running = [name for name in names if name in starts or name in libraries.runners.keys() - failed]
        outcome = alternate(running, options.rounds or _NUM_ROUNDS, mixed.rate)
        outcome.errors.update(failed)
    outcomes = {MIXED.name: outcome}
    print(ratio_table(outcomes, names, peers, "output tokens/s"))
    print(f"best peer: {outcome.best(peers)}")
    missing = reasons(outcomes, libraries.errors)
    print("\n".join(missing))
    settings = {"part": "mixed", "model": model, "threads": options.threads, "runs": options.runs, "contestants": libraries.settings}
    clusters_said = {name: cluster.overrides for name, cluster in clusters.items()}
    found = record(outcomes, names, peers, libraries.errors)
    publish("peers", {**settings, "clusters": clusters_said, "best_peer": outcome.best(peers), **found}, options.results)
    return not missing


@dataclass(frozen=True, slots=True)
class _Mixed:
    calls: LibraryCalls
    starts: Mapping[str, Start]
    seed: int
    num_runs: int

    def rate(self, name: str, index: int) -> float:
        """Output tokens/s in round `index`, the median of its runs. A cluster is started for them: an idle one costs the others time."""
        first = index * self.num_runs
        if name not in self.starts:
            return statistics.median(self.calls.rate(name, MIXED, first + run) for run in range(self.num_runs))
        load = MixedLoad(MIXED.num_prompts, MIXED.num_prompt_tokens, MIXED.num_output_tokens, VOCAB_SIZE, self.seed + first, self.num_runs)
        with self.starts[name]() as url:
            try:
                return statistics.median(result.output_tokens_per_s for result in load.measure(url)[1])
            except (LoadError, WrongAnswer) as error:
                raise PeerError(str(error)) from error
