"""What this process and this host hold, as the kernel counts it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def open_files() -> list[str]:
    """What the open descriptors are, without their numbers."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()).split(":[")[0])
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(found)


def num_pool_mappings() -> int:
    """Mappings of KV pools in this process."""
    return sum("memfd:baton-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


@dataclass(frozen=True)
class Held:
    """What this process holds of the things that leak."""

    files: list[str]
    num_mappings: int
    num_threads: int

    @classmethod
    def now(cls) -> Held:
        """After collecting what earlier tests left in cycles (a gRPC server holds its pool in one)."""
        gc.collect()
        return cls(open_files(), num_pool_mappings(), threading.active_count())


def socket_exists(name: str) -> bool:
    """Whether an abstract Unix socket is listened on or connected to on this host."""
    return f"@{name}\n" in Path("/proc/net/unix").read_text()


def shm_files() -> list[str]:
    """Files of ours and of UCX in /dev/shm."""
    return [path.name for path in Path("/dev/shm").iterdir() if "baton" in path.name or "ucx" in path.name]


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0, interval_s: float = 0.002) -> None:
    """Waits for something that the kernel or a thread of gRPC does in its own time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # nobody sets an event for us
            await asyncio.sleep(interval_s)
