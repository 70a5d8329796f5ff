"""Baton against peers on the same cores: the same token ids through each, in alternating runs; one table of ratios.

    python -m benchmarks.peers --install openvino vllm     virtual environments of their own, in the cache folder
    python -m benchmarks.peers engine                      one worker's engine against OpenVINO, one thread each
    python -m benchmarks.peers mixed                       whole clusters over HTTP against library calls, 16 of (512 in, 64 out) at once
    python -m benchmarks.peers goodput                     clusters against `vllm serve`: the highest rate within the SLOs
    python -m benchmarks.peers interference                what long prompts do to running streams, of clusters and `vllm serve`

Who cannot be installed, started or asked is named below the table with its reason. Exit codes: 0 all has figures, 1 something is missing,
2 the options are wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from typing import Final

from benchmarks.comparison import options as command
from benchmarks.comparison.catalog import PEERS
from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.install import install
from benchmarks.hardware import describe_hardware
from benchmarks.report import progress
from cluster.errors import BatonError, ConfigError

_DEFAULT_THREADS: Final = {"engine": 1}  # all else is measured on two cores


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    options = command.parse(__doc__, arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes that were started end with this one
    try:
        if options.install is not None:
            return _install(options)
        _pin(options)
        return _measure(options)
    except BatonError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _install(options: argparse.Namespace) -> int:
    failed = 0
    for name in options.install or PEERS:
        try:
            install(PEERS[name], options.extra_index_url)
        except PeerError as error:
            progress(f"{name} cannot be installed: {error}")
            failed = 1
    return failed


def _pin(options: argparse.Namespace) -> None:
    """Here, so that whatever is started inherits it."""
    options.threads = options.threads or _DEFAULT_THREADS.get(options.part, 2)
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, options.cores or allowed[-options.threads :])
    progress(str(describe_hardware()))


def _measure(options: argparse.Namespace) -> int:
    part = import_module(f"benchmarks.comparison.{options.part}_part")
    return 0 if part.run(options) else 1


if __name__ == "__main__":
    raise SystemExit(main())
