"""One worker's engine against peers, as libraries: decode and prefill on as many threads each."""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks.comparison.cases import ENGINE_CASES
from benchmarks.comparison.contestants import LibrarySettings, loaded
from benchmarks.comparison.figures import ratio_table, reasons, record
from benchmarks.comparison.library_calls import LibraryCalls
from benchmarks.report import progress, publish
from deploy.config_file import load_serve_file
from deploy.pull import resolve_model

_PEERS: Final = ("openvino",)
_CASES: Final = ("decode-1", "decode-8", "decode-32", "prefill-8x512")
_NUM_ROUNDS: Final = 5
_SEEDS_OF_CASE: Final = 1000  # more than rounds: prompts of one seed begin alike whatever their length, and prefix caches would find them


def run(options: argparse.Namespace) -> bool:
    """Prints and keeps the result; whether everyone has all figures.

    Raises:
        ConfigError: the config or the model is wrong.
    """
    model = options.model or load_serve_file(options.config).config.model
    folder = resolve_model(model, progress)
    peers = _PEERS if options.peers is None else options.peers
    names = [*(f"baton {scheme}" for scheme in options.schemes), *peers]
    libraries = LibrarySettings(folder, options.threads, options.dtype, options.config)
    with loaded(peers, options.schemes, libraries) as contestants:
        running = [name for name in names if name in contestants.runners]
        outcomes = {}
        for index, name in enumerate(options.cases or _CASES):
            calls = LibraryCalls(contestants.runners, options.seed + _SEEDS_OF_CASE * index)
            outcomes[name] = calls.compare(ENGINE_CASES[name], running, options.rounds or _NUM_ROUNDS)
    print(ratio_table(outcomes, names, peers, "tokens/s"))
    missing = reasons(outcomes, contestants.errors)
    print("\n".join(missing))
    settings = {"part": "engine", "model": model, "threads": options.threads, "contestants": contestants.settings}
    publish("peers", {**settings, **record(outcomes, names, peers, contestants.errors)}, options.results)
    return not missing
