"""The processes that this one started, told apart from later ones that reuse their ids. Reads Linux's `/proc`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.05
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good: the id, and the tick at which it started."""

    pid: int
    start_tick: int

    def is_alive(self) -> bool:
        """Whether it runs; a zombie, which only waits to be reaped, does not."""
        found = _read(self.pid)
        return found is not None and found.start_tick == self.start_tick and found.state != "Z"

    def kill(self) -> None:
        """Ends it at once, if it still runs."""
        with suppress(ProcessLookupError):
            if self.is_alive():
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    start_tick: int


def _read(pid: int) -> _Stat | None:
    try:
        # The name in brackets may hold spaces and brackets itself; the fields after the last bracket are fixed.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[19]))


def process_id(pid: int) -> ProcessId | None:
    """The live process that has this id now."""
    found = _read(pid)
    return None if found is None or found.state == "Z" else ProcessId(pid, found.start_tick)


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes this process's child, so that `descendants` still finds it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None) -> set[ProcessId]:
    """Every live process below `root` (default: this one), as of now."""
    stats = {int(entry.name): _read(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found: set[ProcessId] = set()
    below = {os.getpid() if root is None else root}
    while below:
        children = {pid: stat for pid, stat in stats.items() if stat is not None and stat.parent in below}
        found |= {ProcessId(pid, stat.start_tick) for pid, stat in children.items() if stat.state != "Z"}
        below = set(children)
    return found


def await_end(processes: Iterable[ProcessId], timeout_s: float) -> set[ProcessId]:
    """Waits until all have ended; returns those that have not within `timeout_s`. The kernel tells no one but a parent, so it polls."""
    deadline_s = time.monotonic() + timeout_s
    left = {process for process in processes if process.is_alive()}
    while left and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        left = {process for process in left if process.is_alive()}
    return left


def end_descendants(patience_s: float) -> None:
    """Waits until no process is left below this one; those that are after `patience_s` are killed."""
    deadline_s = time.monotonic() + patience_s
    while left := descendants():  # anew each time: one that ends may have started others
        if time.monotonic() >= deadline_s:
            for process in left:
                process.kill()
        time.sleep(_POLL_S)
