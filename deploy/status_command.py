"""`baton status`: the state of a running cluster, once or as it changes."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from deploy.cluster_table import Sample, cluster_lines, duration, fitted
from deploy.openai_client import DEFAULT_URL, OpenAIServer, ServerError

_PATH: Final = "/v1/cluster"
_TIMEOUT_S: Final = 10.0
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _HIDE_CURSOR, _SHOW_CURSOR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[?25l", "\x1b[?25h"


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options; their namespace goes to `status`."""
    parser.add_argument("url", nargs="?", metavar="URL", default=DEFAULT_URL, help="of a Baton (default: %(default)s)")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one table, after two looks: the rates are of the time between them")
    parser.add_argument("--json", action="store_true", help=f"print one answer of GET {_PATH} as it is")


def status(options: argparse.Namespace) -> int:
    """Runs what `options` ask for, without `--once` and `--json` until Ctrl-C; the exit code: 1 when the server does not answer at first.

    Raises:
        ConfigError: the URL is none.
    """
    server = OpenAIServer(options.url, _TIMEOUT_S)
    watch = ClusterWatch(server)
    try:
        watch.look()
        if options.json:
            print(json.dumps(watch.last.cluster, indent=2))
            return 0
        if options.once:
            time.sleep(options.interval)
            watch.look()
            print("\n".join(watch.lines(_width())))
            return 0
    except ServerError as error:
        print(f"baton: {_advised(error, server.url)}", file=sys.stderr)
        return 1
    with suppress(KeyboardInterrupt):
        _show_until_interrupted(watch, options.interval)
    return 0


class ClusterWatch:
    """The last two looks at one cluster, and what went wrong since."""

    def __init__(self, server: OpenAIServer) -> None:
        self._server = server
        self._samples: list[Sample] = []
        self._error = ""

    @property
    def last(self) -> Sample:
        """The last answer; there is one after the first `look` that did not raise."""
        return self._samples[-1]

    def look(self) -> None:
        """Asks once.

        Raises:
            ServerError: no answer. Then the last one stays, and `lines` say so.
        """
        try:
            cluster = self._server.get_json(_PATH)
        except ServerError as error:
            self._error = str(error)
            raise
        if not isinstance(cluster, dict) or "pools" not in cluster:
            raise ServerError(f"{self._server.url}{_PATH} is not a Baton's", 404)
        self._error = ""
        self._samples = [*self._samples[-1:], Sample(time.monotonic(), cluster)]

    def lines(self, width: int) -> list[str]:
        """The header and the table."""
        head = f"{self._server.url}  {time.strftime('%H:%M:%S')}"
        if self._error:
            head += f"  NO ANSWER, as it was {duration(time.monotonic() - self.last.taken_s)} ago: {self._error}"
        return [fitted(head, width), *cluster_lines(self.last, self._samples[0] if len(self._samples) > 1 else None, width)]


def _show_until_interrupted(watch: ClusterWatch, interval_s: float) -> None:
    is_terminal = sys.stdout.isatty()
    with _screen() if is_terminal else nullcontext():
        while True:
            lines = watch.lines(_width())
            text = _redraw(lines, shutil.get_terminal_size().lines) if is_terminal else "\n".join([*lines, "\n"])
            print(text, end="", flush=True)
            time.sleep(interval_s)
            try:
                watch.look()
            except ServerError:
                continue  # the header says it


def _redraw(lines: list[str], height: int) -> str:
    """What draws `lines` over the ones before; no more than fit, or the terminal would scroll."""
    if len(lines) >= height > 1:
        lines = [*lines[: height - 2], f"… {len(lines) - height + 2} more lines"]
    return _HOME + "".join(f"{line}{_CLEAR_LINE}\r\n" for line in lines) + _CLEAR_BELOW


@contextmanager
def _screen() -> Iterator[None]:
    """Without a cursor, which comes back whatever ends it."""
    before: Any = signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(_HIDE_CURSOR + _HOME + _CLEAR_BELOW, end="")
    try:
        yield
    finally:
        print(_SHOW_CURSOR, end="", flush=True)
        signal.signal(signal.SIGTERM, before)


def _width() -> int:
    """Of the terminal; a file or a pipe takes any."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000


def _advised(error: ServerError, url: str) -> str:
    return f"{url} is no Baton: it has no {_PATH}" if error.status == 404 else str(error)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"must be seconds, above 0 (got {text!r})")
