"""The command line of a soak."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.load.lengths import FORMS
from benchmarks.load.options import count, length, positive, share, vocab_size
from benchmarks.report import RESULTS
from cluster.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options."""
    _add_target(parser.add_argument_group("target"))
    _add_load(parser.add_argument_group("load"))
    _add_judgement(parser.add_argument_group("what is said of it"))


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", type=Path, default=Path("deploy/local.yaml"), help="what is started (default: %(default)s)")
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the args; may be repeated")
    group.add_argument("--port", type=count, default=8038, help="that it serves HTTP on (default: %(default)s)")
    group.add_argument("--grpc-port", type=count, default=8039, help="that it serves gRPC on (default: %(default)s)")
    group.add_argument("--url", help="of a Baton that runs already, instead of starting one; needs --pid")
    group.add_argument("--pid", type=count, help="of the `baton serve` at --url: its processes are sampled")
    group.add_argument("--grpc-target", metavar="HOST:PORT", help="gRPC of the Baton at --url (default: no gRPC requests)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--duration", type=positive, default=1800.0, metavar="S", help="of the load (default: %(default)s)")
    group.add_argument("--warm-up", type=positive, default=300.0, metavar="S", help="of it, not judged (default: %(default)s)")
    group.add_argument("--idle", type=positive, metavar="S", help="after the load, without requests: what grows by time alone")
    group.add_argument("--rate", type=positive, metavar="R", help="requests/s on average, Poisson")
    group.add_argument(
        "--load-share", type=share, default=0.6, help="without --rate: of the capacity, measured first (default: %(default)s)"
    )
    group.add_argument(
        "--cancel-share", type=share, default=0.35, help="that get a moment of cancelling; most come to it (default: %(default)s)"
    )
    group.add_argument(
        "--input-tokens", type=length, default="lognormal:96:0.9:1500", metavar="LENGTH", help=f"{FORMS} (default: %(default)s)"
    )
    group.add_argument("--output-tokens", type=length, default="lognormal:16:0.8:128", metavar="LENGTH", help="(default: %(default)s)")
    group.add_argument("--vocab-size", type=vocab_size, default=32_000, metavar="N", help="token ids are below N (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of send times, lengths, prompts and cancels (default: %(default)s)")


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sample-interval", type=positive, default=10.0, metavar="S", help="(default: %(default)s)")
    group.add_argument("--progress-interval", type=positive, default=15.0, metavar="S", help="between lines (default: %(default)s)")
    group.add_argument(
        "--results", type=Path, default=RESULTS / "soak.jsonl", metavar="FILE", help="for the JSON line (default: %(default)s)"
    )
    group.add_argument("--plot", type=Path, metavar="PNG", help="draw memory over time (needs requirements/bench.txt)")


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: options that contradict each other.
    """
    if (options.url is None) != (options.pid is None):
        raise ConfigError("--url and --pid go together: the processes below --pid are those that are sampled", param="--pid")
    if options.url is not None and options.set:
        raise ConfigError("--set is for a Baton that is started here, not for one at --url", param="--set")
    if options.warm_up >= options.duration:
        raise ConfigError(f"--warm-up ({options.warm_up:g} s) leaves nothing of --duration ({options.duration:g} s)", param="--warm-up")
