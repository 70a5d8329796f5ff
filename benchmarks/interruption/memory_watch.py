"""What a replica and those beside it hold while something happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from benchmarks.memory import command_of, resident_bytes
from deploy.process_tree import descendants

_INTERVAL_S: Final = 0.5
_WATCHED: Final = ("ray::ServeReplica", "ray::ProxyActor")


class MemoryWatch:
    """Of the process `pid` and the replicas and proxies that Ray started beside it."""

    def __init__(self, pid: int) -> None:
        """
        Raises:
            ProcessLookupError: there is no such process.
        """
        beside = [process.pid for process in descendants(_parent(pid)) if command_of(process.pid).startswith(_WATCHED)]
        self.names = {each: _name(each) for each in (pid, *beside)}
        self._grown = dict.fromkeys(self.names, 0)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Takes note of how far each process grows above what it holds now."""
        before = {each: resident_bytes(each) for each in self.living}
        task = asyncio.create_task(self._watch(before))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    @property
    def living(self) -> list[int]:
        return [each for each, name in self.names.items() if _name(each) == name]

    @property
    def ended(self) -> list[str]:
        """Title and pid of those that are no more."""
        living = self.living
        return [f"{name} {each}" for each, name in self.names.items() if each not in living]

    def grown_bytes(self) -> dict[str, int]:
        """By title and pid: the most that it grew while watched."""
        return {f"{name} {each}": self._grown[each] for each, name in self.names.items()}

    async def _watch(self, before: dict[int, int]) -> None:
        while True:
            for each, num_bytes in before.items():
                with suppress(OSError):  # it has ended
                    self._grown[each] = max(self._grown[each], resident_bytes(each) - num_bytes)
            await asyncio.sleep(_INTERVAL_S)


def _name(pid: int) -> str:
    """Its title without the method that an actor is called by just now."""
    return command_of(pid).partition(".")[0]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
