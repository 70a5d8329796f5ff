"""The command line of `benchmarks.peers`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final, get_args

from benchmarks.comparison.cases import ENGINE_CASES
from benchmarks.comparison.catalog import PEERS, fastest_dtype
from benchmarks.comparison.servers import Cluster, parse_cluster
from benchmarks.load.options import count, positive
from benchmarks.report import RESULTS
from cluster.config import Scheme

PARTS: Final = ("engine", "mixed", "goodput", "interference")


def parse(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """The options, checked against each other; a usage error ends the process with 2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="what is measured")
    parser.add_argument(
        "--install", nargs="*", metavar="PEER", help=f"makes environments of these peers (none named: all): {' '.join(PEERS)}"
    )
    parser.add_argument("--extra-index-url", metavar="URL", help="of --install: another package index, as one with CPU builds of torch")
    parser.add_argument("--peers", nargs="*", metavar="PEER", help="who is compared (engine: openvino; mixed: openvino vllm; others: vllm)")
    parser.add_argument(
        "--rounds", type=count, metavar="N", help="of everyone in turns (engine 5, mixed 3, interference 3); of goodput: seeds (3)"
    )
    parser.add_argument("--config", type=Path, default=Path("deploy/local.yaml"), help="Baton's settings (default: %(default)s)")
    parser.add_argument("--model", help="another than the config's")
    parser.add_argument(
        "--cores", type=_cores, metavar="LIST", help="as 0,1: everything runs on these (default: the last ones, one a thread)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS / "peers.jsonl", help="gets the line of JSON (default: %(default)s)")
    libraries = parser.add_argument_group("libraries: engine, mixed")
    libraries.add_argument("--cases", nargs="+", choices=list(ENGINE_CASES), metavar="CASE", help=f"of engine: {' '.join(ENGINE_CASES)}")
    libraries.add_argument("--schemes", nargs="*", choices=get_args(Scheme), default=["int8", "int4"], help="of Baton's engine (int8 int4)")
    libraries.add_argument("--threads", type=count, metavar="N", help="of each library (engine 1, mixed 2)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=fastest_dtype(),
        help="in which vllm and transformers compute (default: bfloat16 where the CPU has it, else float32; here %(default)s)",
    )
    _add_cluster(parser.add_argument_group("clusters and servers: mixed, goodput, interference"))
    options = parser.parse_args(arguments)
    _check(parser, options)
    return options


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cluster",
        action="append",
        type=_cluster,
        default=[],
        metavar="NAME:KEY=VALUE,…",
        help="a setting of Baton that takes part, as 'split:prefill.threads=1,decode.threads=1'; may be repeated, replaces the part's own",
    )
    group.add_argument("--port", type=count, default=8028, help="that servers listen on; the next one is gRPC's (default: %(default)s)")
    group.add_argument("--runs", type=count, default=2, help="of mixed: measured runs a start, whose median counts (default: %(default)s)")
    group.add_argument("--requests", type=count, default=120, help="of goodput: a run (default: %(default)s)")
    group.add_argument(
        "--first-rate",
        type=_first_rate,
        action="append",
        default=[],
        metavar="NAME=R",
        help="of goodput: requests/s tried first, as 'vllm=0.3' or 'baton colocated 2=2'; may be repeated (default: 0.5)",
    )
    group.add_argument(
        "--seconds", type=positive, default=20.0, help="of interference: with the prompts, and as long without (default: %(default)s)"
    )


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.part is None) == (options.install is None):
        parser.error(f"either --install or one of {', '.join(PARTS)}")
    unknown = [name for name in (*(options.install or ()), *(options.peers or ())) if name not in PEERS]
    if unknown:
        parser.error(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}")


def _cluster(text: str) -> Cluster:
    try:
        return parse_cluster(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _first_rate(text: str) -> tuple[str, float]:
    name, _, rate = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=R")
    return name, positive(rate)


def _cores(text: str) -> list[int]:
    allowed = os.sched_getaffinity(0)
    try:
        cores = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of cores") from error
    if missing := [core for core in cores if core not in allowed]:
        raise argparse.ArgumentTypeError(f"core {missing[0]} is not one of {', '.join(map(str, sorted(allowed)))}")
    return cores
