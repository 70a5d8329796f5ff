"""The command line of `baton bench`. Imports little, since every `baton` command builds it for its help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.load.lengths import FORMS, Length, parse_length


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options; their namespace goes to `benchmarks.serve.bench`."""
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="of an OpenAI server, or grpc://HOST:PORT of a Baton (default: %(default)s)"
    )
    _add_target(parser.add_argument_group("target"))
    _add_pace(parser.add_argument_group("when requests are sent"))
    _add_requests(parser.add_argument_group("what is asked"))
    _add_judgement(parser.add_argument_group("what is said of it"))


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help="endpoint (default: %(default)s)")
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of one request (default: %(default)s)")
    group.add_argument("--stop-at-eos", action="store_true", help="do not send ignore_eos: answers may be shorter than asked for")
    group.add_argument("--body", type=_json_object, default={}, metavar="JSON", help="fields added to every request")


def _add_pace(group: argparse._ArgumentGroup) -> None:
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=positive, metavar="R", help="open loop: requests/s on average, Poisson")
    pace.add_argument("--concurrency", type=count, metavar="N", help="closed loop: N users, each waits for its answer (default: 4)")
    group.add_argument("--burst", type=count, default=1, metavar="N", help="open loop: N requests at once, bursts at rate R/N")
    group.add_argument("--requests", type=count, metavar="N", help="how many (default: those of --dataset once, or 100)")
    group.add_argument("--duration", type=positive, metavar="S", help="send no more after S seconds")
    group.add_argument("--warm-up", type=_count_or_none, default=2, metavar="N", help="requests before, not counted (default: %(default)s)")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-tokens", type=length, default="512", metavar="LENGTH", help=f"of a prompt: {FORMS} (default: %(default)s)")
    group.add_argument("--output-tokens", type=length, default="64", metavar="LENGTH", help="of an answer (default: %(default)s)")
    group.add_argument("--text", action="store_true", help="prompts of words, not of token ids; then LENGTH counts words (chat: always)")
    group.add_argument("--vocab-size", type=vocab_size, default=32_000, metavar="N", help="token ids are below N (default: %(default)s)")
    group.add_argument("--dataset", type=Path, metavar="JSONL", help='lines of {"prompt": text or ids, "max_tokens": n}')
    group.add_argument("--seed", type=int, default=0, help="of send times, lengths and prompts (default: %(default)s)")


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--slo", action="append", default=[], metavar="NAME=S", help="bound on ttft, tpot or e2e; may be repeated")
    group.add_argument("--search", action="store_true", help="find the highest rate that attains the SLOs, from --rate (default: 1)")
    group.add_argument("--attain", type=share, default=0.9, metavar="SHARE", help="of requests within the SLOs (default: %(default)s)")
    group.add_argument("--precision", type=positive, default=0.05, help="of --search, relative (default: %(default)s)")
    group.add_argument("--progress-interval", type=positive, default=2.0, metavar="S", help="between lines (default: %(default)s)")
    group.add_argument("--results", type=Path, metavar="FILE", help="append the JSON line to FILE")
    group.add_argument("--plot", type=Path, metavar="PNG", help="draw latency over time (needs requirements/bench.txt)")


def length(text: str) -> Length:
    """A law of lengths, with its own message in the usage error, which argparse takes from this exception alone."""
    try:
        return parse_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _number(text: str, kind: str, is_valid: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not is_valid(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no {kind}")
    return number


def positive(text: str) -> float:
    return _number(text, "positive number", lambda number: 0 < number < float("inf"))


def share(text: str) -> float:
    return _number(text, "share above 0 and up to 1", lambda number: 0 < number <= 1)


def count(text: str) -> int:
    return int(_number(text, "count of at least 1", lambda number: number >= 1 and number.is_integer()))


def _count_or_none(text: str) -> int:
    return int(_number(text, "count", lambda number: number >= 0 and number.is_integer()))


def vocab_size(text: str) -> int:
    return int(_number(text, "vocabulary of more than 256 tokens", lambda number: number > 256 and number.is_integer()))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object")
    return value
