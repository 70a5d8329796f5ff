"""Disaggregated against colocated: both modes of one config file, started in turns on the same means.

Same model, same schemes, and the same number of torch threads and KV bytes in all: the colocated engine gets those of both pools.
One ratio a round, of runs that are neighbours in time; the median of the ratios is the figure, since a shared machine's speed drifts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.load.driver import LoadResult
from benchmarks.mixed_load import HEADER, MixedLoad, figures, row
from benchmarks.report import RESULTS, progress, publish, table
from cluster.config import BatonConfig
from cluster.errors import ConfigError
from deploy.config_file import ServeFile, load_serve_file
from deploy.first_prompt import await_ready
from deploy.local_cluster import LocalCluster
from deploy.progress import Progress

Rounds = dict[str, list[list[LoadResult]]]  # by mode: of each start, its runs


def compare(path: Path, port: int, load: MixedLoad, num_rounds: int, num_colocated_workers: int) -> None:
    """Runs `num_rounds` of both modes, prints them, and keeps the result.

    Raises:
        ConfigError: the file is wrong, or its threads cannot be shared by the colocated workers.
        StartFailed: a mode did not come up.
    """
    config = load_serve_file(path).config
    overrides = {"disaggregated": ["mode=disaggregated"], "colocated": colocated_overrides(config, num_colocated_workers)}
    rounds: Rounds = {mode: [] for mode in overrides}
    for index in range(num_rounds):
        # The order turns from round to round, so that neither mode always has the warmer machine.
        for mode in list(overrides)[:: -1 if index % 2 else 1]:
            progress(f"round {index + 1} of {num_rounds}: starting {mode}")
            with _served(load_serve_file(path, [*overrides[mode], "gateway.grpc_port=null"], port)) as url:
                rounds[mode].append(load.measure(url)[1])
    _publish(load, config, overrides, rounds)


def colocated_overrides(config: BatonConfig, num_workers: int) -> list[str]:
    """What turns `config` into colocated mode with `num_workers` workers that have, together, the means of both pools.

    Raises:
        ConfigError: the threads cannot be shared equally.
    """
    pools = (config.prefill, config.decode)
    threads = sum(pool.replicas * pool.threads for pool in pools)
    if threads % num_workers:
        raise ConfigError(f"{threads} threads cannot be shared by {num_workers} colocated workers", param="--colocated-workers")
    shares = {
        "threads": threads // num_workers,
        "kv_cache_bytes": sum(pool.replicas * pool.kv_cache_bytes for pool in pools) // num_workers,
        "num_cpus": sum(pool.replicas * pool.num_cpus for pool in pools) / num_workers,
    }
    return ["mode=colocated", f"decode.replicas={num_workers}", *(f"decode.{key}={value}" for key, value in shares.items())]


def ratios(rounds: Rounds) -> list[float]:
    """Of each round: disaggregated over colocated, in output tokens/s, medians of a start's runs."""
    medians = [[_median_rate(start) for start in rounds[mode]] for mode in ("disaggregated", "colocated")]
    return [ours / base for ours, base in zip(*medians, strict=True)]


def _median_rate(results: Sequence[LoadResult]) -> float:
    return statistics.median(result.output_tokens_per_s for result in results)


@contextmanager
def _served(file: ServeFile) -> Iterator[str]:
    """The cluster of `baton serve`, without its terminal; every process is gone afterwards."""
    cluster = LocalCluster(file, Progress(sys.stderr))
    try:
        cluster.start_ray()
        cluster.start_serve()
        cluster.deploy()
        cluster.await_running()
        await_ready(file.url)
        yield file.url
    finally:
        cluster.stop()


def _publish(load: MixedLoad, config: BatonConfig, overrides: dict[str, list[str]], rounds: Rounds) -> None:
    rows = [row(f"{mode} {index + 1}", result) for mode, starts in rounds.items() for index, runs in enumerate(starts) for result in runs]
    print(table(HEADER, rows))
    found = ratios(rounds)
    rates = {mode: statistics.median(_median_rate(start) for start in starts) for mode, starts in rounds.items()}
    print("; ".join(f"{mode}: {rate:.1f} output tokens/s" for mode, rate in rates.items()))
    print(f"disaggregated / colocated: {statistics.median(found):.2f} (rounds: {', '.join(f'{ratio:.2f}' for ratio in sorted(found))})")
    summary = {
        "model": config.model,
        "schemes": {"prefill": config.prefill.scheme, "decode": config.decode.scheme},
        "load": asdict(load),
        "overrides": overrides,
        "output_tokens_per_s": {mode: round(rate, 1) for mode, rate in rates.items()},
        "ratio": round(statistics.median(found), 3),
        "ratios": [round(ratio, 3) for ratio in found],
        "rounds": {mode: [[figures(result) for result in runs] for runs in starts] for mode, starts in rounds.items()},
    }
    publish("serve_mixed", summary, RESULTS / "serve_mixed.jsonl")
