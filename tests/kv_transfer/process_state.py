"""What this process and this host hold, as the kernel counts it."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

POOL_MAPPING: Final = "mapping of a pool"
_BOUNDED: Final = {"asyncio_N"}  # threads of an event loop's own pool, which starts some more until it has six
_LISTEN: Final = "0A"  # a state in /proc/net/tcp


def open_files() -> list[str]:
    """What the open descriptors are, without their numbers."""
    return sorted(link.split(":[")[0] for link in _descriptors())


def _descriptors() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            yield str(link.readlink())


def listening_addresses() -> Counter[str]:
    """The IPv4 addresses that this process listens on, each as often as it does."""
    ours = {link.removeprefix("socket:[").removesuffix("]") for link in _descriptors()}
    sockets = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    return Counter(_address(fields[1]) for fields in sockets if fields[3] == _LISTEN and fields[9] in ours)


def _address(field: str) -> str:
    return str(ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(field.partition(":")[0]), sys.byteorder)))


def num_pool_mappings() -> int:
    """Mappings of KV pools in this process."""
    return sum("memfd:baton-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


class Held(Counter[str]):
    """What this process holds of the things that leak: open files, mappings of pools, threads; each as often as it does."""

    @classmethod
    def now(cls) -> Held:
        """After collecting what earlier tests left in cycles (a gRPC server holds its pool in one)."""
        gc.collect()
        names = (re.sub(r"\d+", "N", thread.name) for thread in threading.enumerate())
        return cls([*open_files(), *(f"thread {name}" for name in names if name not in _BOUNDED), *[POOL_MAPPING] * num_pool_mappings()])


async def nothing_beyond(before: Held, now: Callable[[], Held] = Held.now, timeout_s: float = 10.0) -> None:
    """Waits until nothing is held that was not before; things that others held may be gone."""
    deadline_s = time.monotonic() + timeout_s
    while more := now() - before:
        assert time.monotonic() < deadline_s, f"still held: {dict(more)}"
        await asyncio.sleep(0.01)


def socket_exists(name: str) -> bool:
    """Whether an abstract Unix socket is listened on or connected to on this host."""
    return f"@{name}\n" in Path("/proc/net/unix").read_text()


def shm_files() -> list[str]:
    """Files of ours and of UCX in /dev/shm."""
    return [path.name for path in Path("/dev/shm").iterdir() if "baton" in path.name or "ucx" in path.name]
