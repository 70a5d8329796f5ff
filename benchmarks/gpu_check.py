"""Everything that needs a GPU, in under eight minutes on one: all `gpu` tests, then what NCCL makes of KV blocks.

python -m benchmarks.gpu_check                     tests for at most five minutes, then the figures
python -m benchmarks.gpu_check --no-tests --repeats 30
python -m benchmarks.gpu_check --no-figures

Exit codes: 0 all tests ran and passed and the bytes arrived; 1 not so, a skipped test included; 2 no device here, or the options are wrong.
What the figures mean is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.device import NoDevice, describe_device, find_device
from benchmarks.gpu.self_send import BLOCK_BYTES, READ_BYTES, Figure, measure
from benchmarks.gpu.suite import SuiteResult, run_suite
from benchmarks.report import RESULTS, progress, publish, table
from cluster.errors import TransferError

TESTS_LIMIT_S: Final = 300.0
_HEADER: Final = ("block", "blocks", "read", "NCCL, blocks", "µs a block", "NCCL, one send", "copy", "of copy")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parse(argv)
    try:
        device = find_device()
    except NoDevice as error:
        print(f"gpu_check needs a CUDA device: {error}", file=sys.stderr)
        return 2
    description = describe_device(device)
    progress(
        f"{description.name}, driver {description.driver}, NCCL {description.nccl}, cupy {description.cupy}, torch {description.torch}"
    )
    suite = _tests(options)
    figures, problem = ([], None) if options.no_figures else _figures(device, options.repeats)
    result: dict[str, Any] = {"device": asdict(description), "figures": [asdict(figure) for figure in figures], "problem": problem}
    if suite is not None:
        result["tests"] = asdict(suite)
    publish("gpu_check", result, options.results)
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None and (suite is None or suite.is_good) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tests-limit", type=float, default=TESTS_LIMIT_S, metavar="SECONDS", help="the tests are ended after it (%(default)g)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="of each figure (%(default)d)")
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    parser.add_argument("--no-figures", action="store_true", help="tests alone")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu_check.jsonl", help="file that keeps the line of JSON (%(default)s)")
    options = parser.parse_args(argv)
    if options.tests_limit <= 0 or options.repeats < 1:
        parser.error("--tests-limit and --repeats must be positive")
    if options.no_tests and options.no_figures:
        parser.error("--no-tests and --no-figures leave nothing to do")
    return options


def _tests(options: argparse.Namespace) -> SuiteResult | None:
    if options.no_tests:
        return None
    progress(f"all gpu tests, for at most {options.tests_limit:g} s")
    suite = run_suite(options.tests_limit)
    ended = ", ended by the limit" if suite.timed_out else ""
    progress(f"{suite.passed} passed, {suite.failed} failed, {suite.skipped} skipped in {suite.duration_s} s{ended}")
    return suite


def _figures(device: Any, repeats: int) -> tuple[list[Figure], str | None]:
    """And what went wrong, if something did: the figures before it are kept."""
    progress("NCCL to itself")
    figures: list[Figure] = []
    problem = None
    try:
        for figure in measure(device, torch.device("cuda", 0), repeats, blocks=BLOCK_BYTES, reads=READ_BYTES):
            progress(f"{figure.num_blocks} blocks of {figure.block_bytes} bytes: {figure.blocks_gb_s:.1f} GB/s")
            figures.append(figure)
    except (TransferError, RuntimeError) as error:  # RuntimeError: CUDA's are, when torch says them
        problem = f"the figures ended early: {error}"
    print(table(_HEADER, [_row(figure) for figure in figures]))
    return figures, problem


def _row(figure: Figure) -> list[str]:
    return [
        f"{figure.block_bytes / 2**10:.0f} KiB",
        str(figure.num_blocks),
        f"{figure.block_bytes * figure.num_blocks / 2**20:.0f} MiB",
        f"{figure.blocks_gb_s:.1f} GB/s",
        f"{figure.us_per_block:.2f}",
        f"{figure.one_send_gb_s:.1f} GB/s",
        f"{figure.copy_gb_s:.1f} GB/s",
        f"{figure.of_copy:.0%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
