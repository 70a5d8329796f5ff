"""The Baton that is soaked: one started here, as `baton serve` starts it, or one that runs already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from benchmarks.report import progress
from cluster.errors import ConfigError
from deploy.process_tree import ProcessId, await_end, descendants, process_id

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_START_TIMEOUT_S: Final = 300.0
_END_TIMEOUT_S: Final = 60.0


class StartFailed(Exception):
    """The cluster did not come up; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask, and the process below which all others of the cluster are."""

    url: str
    grpc_target: str | None
    root: ProcessId


def running(url: str, grpc_target: str | None, pid: int) -> Target:
    """A Baton that runs already, `pid` being its `baton serve`.

    Raises:
        ConfigError: there is no such process.
    """
    root = process_id(pid)
    if root is None:
        raise ConfigError(f"--pid {pid}: no such process", param="--pid")
    return Target(url.rstrip("/").removesuffix("/v1"), grpc_target, root)


@contextmanager
def started(config: Path, overrides: Sequence[str], port: int, grpc_port: int) -> Iterator[Target]:
    """`baton serve`, in a session of its own, so that Ctrl-C ends the load first; every process is gone afterwards.

    Raises:
        StartFailed: it did not come up.
    """
    settings = [f"gateway.grpc_port={grpc_port}", *overrides]
    options = ["--config", str(config), "--port", str(port), *(part for setting in settings for part in ("--set", setting))]
    command = [sys.executable, "-m", "deploy.cli", "serve", *options]
    with subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            _await_serving(process)
            root = process_id(process.pid)
            if root is None:
                raise StartFailed("it ended as soon as it served")
            yield Target(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", root)
        finally:
            _end(process)


def _await_serving(process: subprocess.Popen[str]) -> None:
    """Reads on until it serves. Nothing is read afterwards: it says a line when a replica comes or goes, and the pipe holds thousands."""
    assert process.stdout is not None
    said: list[str] = []
    limit = threading.Timer(_START_TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        served = _read_until_serving(process.stdout, said)
    finally:
        limit.cancel()
    if not served:
        raise StartFailed("".join(said).strip() or "it ended without a word")


def _read_until_serving(output: IO[str], said: list[str]) -> bool:
    for line in output:
        said.append(line)
        if line.startswith("==>"):
            progress(line.removeprefix("==>").strip())
        if line.startswith("Serving "):
            return True
    return False


def _end(process: subprocess.Popen[str]) -> None:
    left = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    for orphan in await_end(left, timeout_s=5.0):
        orphan.kill()
