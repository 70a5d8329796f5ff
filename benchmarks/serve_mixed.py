"""Output tokens per second of 16 requests of 512 in, 64 out, all at once, over HTTP.

python -m benchmarks.serve_mixed http://127.0.0.1:8000       a Baton that runs already
python -m benchmarks.serve_mixed --compare                   disaggregated against colocated, both started here
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.hardware import describe_hardware
from benchmarks.mixed_load import HEADER, MixedLoad, figures, row
from benchmarks.report import RESULTS, progress, publish, table
from deploy.environment import prepare_environment


def main() -> None:
    """The command."""
    options = _options()
    load = MixedLoad(options.requests, options.input_tokens, options.output_tokens, options.vocab_size, options.seed, options.runs)
    progress(str(describe_hardware()))
    if options.compare:
        prepare_environment()
        from benchmarks.mode_comparison import compare  # imports Ray, which reads the environment

        compare(options.config, options.port, load, options.rounds, options.colocated_workers)
    else:
        _measure(options.url, load)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of a running Baton (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="start both modes and compare them")
    parser.add_argument("--config", type=Path, default=Path("deploy/local.yaml"), help="what --compare starts (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8018, help="that --compare serves on (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each mode (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=2, help="measured runs a start; their median counts (default: %(default)s)")
    parser.add_argument("--colocated-workers", type=int, default=1, help="that share the threads of both pools (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=32_000, help="prompts are drawn from the ids below (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _measure(url: str, load: MixedLoad) -> None:
    model, results = load.measure(url)
    print(table(HEADER, [row(f"{model} {index + 1}", result) for index, result in enumerate(results)]))
    found = {"model": model, "url": url, "load": asdict(load), "runs": [figures(result) for result in results]}
    publish("serve_mixed", found, RESULTS / "serve_mixed.jsonl")


if __name__ == "__main__":
    main()
