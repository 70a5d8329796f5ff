"""`baton doctor`: asks a running Baton for the books of all its processes, and says whether they balance.

Exit codes: 0 balanced (with `--wait`: and idle), 1 something is off, or not idle when the wait was over, 2 the command line is wrong,
3 nothing answers at the URL, or something that is not Baton.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final
from urllib.parse import urlsplit

from cluster.books import ClusterBooks, ProcessBooks
from cluster.wire import WireError, validated
from deploy.diagnosis import CONFIRM_S, Diagnosis, diagnose, in_order
from deploy.openai_client import DEFAULT_URL, OpenAIServer, ServerError

_PATH: Final = "/v1/cluster/books"
_TIMEOUT_S: Final = 30.0
_HEADINGS: Final = ("process", "kind", "open files", "KV pools mapped", "RSS", "threads", "holds")


class Unreachable(Exception):
    """Nothing at the URL answers as Baton does."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command line of `baton doctor`."""
    parser.add_argument("url", nargs="?", type=_url, default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--wait", type=_seconds, default=0.0, metavar="S", help="ask until the cluster is idle and balanced, for S seconds")
    parser.add_argument("--json", action="store_true", help="print the books and the findings as JSON")


def doctor(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    try:
        books, found = examine(lambda: fetch_books(options.url), options.wait)
    except Unreachable as error:
        print(f"baton: {error}", file=sys.stderr)
        return 3
    print(json.dumps(_as_json(books, found), indent=2) if options.json else f"{_table(books)}\n\n{found}")
    return 0 if found.is_idle or (found.is_balanced and not options.wait) else 1


def examine(fetch: Callable[[], ClusterBooks], wait_s: float = 0.0) -> tuple[ClusterBooks, Diagnosis]:
    """The last books and the diagnosis. What looks off is asked for once more; with `wait_s`, again until all is idle.

    Raises:
        Unreachable: at the first time that is not to be waited for any more.
    """
    until_s = time.monotonic() + wait_s
    books = _patiently(fetch, until_s)
    found = diagnose(books)
    while not (found.is_idle or (found.is_balanced and not wait_s)):
        time.sleep(CONFIRM_S)
        earlier, books = books, _patiently(fetch, until_s)
        found = diagnose(books, earlier)
        if time.monotonic() >= until_s:
            break
    return books, found


def fetch_books(url: str) -> ClusterBooks:
    """The books of the cluster behind `url`.

    Raises:
        Unreachable: the message says what came instead.
    """
    try:
        status, body = OpenAIServer(url, _TIMEOUT_S).get(_PATH)
    except ServerError as error:
        cause = error.__cause__
        raise Unreachable(f"{url} does not answer: {str(cause) or type(cause).__name__}") from error
    if status != 200:
        raise Unreachable(f"{url}{_PATH} answers HTTP {status}: {body[:200].strip()}")
    try:
        return validated(ClusterBooks, json.loads(body))
    except (ValueError, WireError) as error:
        raise Unreachable(f"{url}{_PATH} answers with something else than books") from error


def _patiently(fetch: Callable[[], ClusterBooks], until_s: float) -> ClusterBooks:
    while True:
        try:
            return fetch()
        except Unreachable:
            if time.monotonic() >= until_s:
                raise
        time.sleep(CONFIRM_S)


def _as_json(books: ClusterBooks, found: Diagnosis) -> dict[str, Any]:
    findings = [asdict(finding) for finding in found.findings]
    return {"verdict": found.verdict.rstrip(":"), "num_running": found.num_running, "findings": findings, **asdict(books)}


def _table(books: ClusterBooks) -> str:
    rows = [_HEADINGS, *map(_row, in_order(books.processes))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(process: ProcessBooks) -> tuple[str, ...]:
    state = process.state
    pools = f"{len(process.pools)}: {_mib(sum(process.pools.values()))}" if process.pools else "none"
    num_files = str(sum(state.open_files.values()))
    holds = (", ".join(_holdings(process)) or "nothing") + (" before a long step" if process.is_busy else "")
    return process.process, process.kind, num_files, pools, _mib(state.rss_bytes), str(state.num_threads), holds


def _holdings(process: ProcessBooks) -> Iterator[str]:
    return (f"{name} {number}" for name, number in process.held.items() if number)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL, as {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
