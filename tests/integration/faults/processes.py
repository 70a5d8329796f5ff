"""What the served processes hold, as the kernel counts it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import command_of, resident_bytes
from deploy.process_tree import descendants
from tests.integration.served import SPARE_SOCKETS, Served

PROXY = "Proxy"
DEPLOYMENTS = ("Gateway", "Router", "Prefill", "Decode")
_CLOSE_S = 15.0


@dataclass(frozen=True, slots=True)
class Process:
    """One of the served processes."""

    kind: str
    pid: int

    def num_open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def processes(served: Served, *kinds: str) -> list[Process]:
    """Those of `kinds` (default: all) that live now, by the names that Ray gives its processes."""
    names = {kind: f"ray::ServeReplica:{served.name}:{kind}" for kind in DEPLOYMENTS} | {PROXY: "ray::ProxyActor"}
    found = {process.pid: command_of(process.pid) for process in descendants()}
    return [Process(kind, pid) for kind in kinds or names for pid, command in found.items() if command.startswith(names[kind])]


@asynccontextmanager
async def bounded_memory(served: Served, limit_bytes: int) -> AsyncIterator[None]:
    """None of the served processes may grow by more than `limit_bytes` inside, not even for a moment.

    Raises:
        AssertionError: one did.
    """
    before = {process: resident_bytes(process.pid) for process in processes(served)}
    peak = dict(before)
    watch = asyncio.create_task(_watch(peak))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait({watch})
    grown = {process: peak[process] - before[process] for process in before}
    print("grown by", {f"{process.kind} {process.pid}": f"{num_bytes / 2**20:.1f} MiB" for process, num_bytes in grown.items()})
    assert max(grown.values()) < limit_bytes, grown


async def _watch(peak: dict[Process, int]) -> None:
    while True:
        peak.update({process: max(num_bytes, resident_bytes(process.pid)) for process, num_bytes in peak.items()})
        await asyncio.sleep(0.5)


def open_files(served: Served) -> dict[Process, int]:
    """By process."""
    return {process: process.num_open_files() for process in processes(served)}


async def await_files_closed(served: Served, before: dict[Process, int]) -> None:
    """Returns when each process has as many open files as it had, but for `SPARE_SOCKETS`; that is bound to come soon."""
    deadline_s = time.monotonic() + _CLOSE_S
    while left := _more_open(before, open_files(served)):
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.2)


def _more_open(before: dict[Process, int], now: dict[Process, int]) -> dict[Process, tuple[int, int]]:
    assert set(now) == set(before), "these are other processes"
    return {process: (before[process], count) for process, count in now.items() if count > before[process] + SPARE_SOCKETS}
