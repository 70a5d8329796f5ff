"""What one process holds at one moment. Reads Linux's `/proc`.

RSS alone calls a KV pool that is touched for the first time a leak. So it is split: `anonymous` (heap, arenas, stacks: what leaks are
made of) and `shmem` (memfds and shared segments: the KV pool, Ray's object store). The rest are pages of files, mostly libraries.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Sizes in bytes."""

    rss_bytes: int
    pss_bytes: int  # each page shared by n processes counts as 1/n
    anonymous_bytes: int
    shmem_bytes: int
    num_open_files: int
    num_threads: int

    @classmethod
    def read(cls, pid: int) -> ProcessSample:
        """
        Raises:
            OSError: it has ended, or belongs to another user.
        """
        proc = Path(f"/proc/{pid}")
        status = _fields(proc / "status")
        rollup = _fields(proc / "smaps_rollup")  # no such process, where it is a zombie
        return cls(
            rss_bytes=rollup["Rss"] * _KIB,
            pss_bytes=rollup["Pss"] * _KIB,
            anonymous_bytes=rollup["Anonymous"] * _KIB,
            shmem_bytes=status.get("RssShmem", 0) * _KIB,
            num_open_files=len(os.listdir(proc / "fd")),  # noqa: PTH208  # no Path for each of them
            num_threads=status["Threads"],
        )


def _fields(path: Path) -> dict[str, int]:
    """Lines of `name: number [kB]`; other lines are let be."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if number.isdigit():
            found[name] = int(number)
    return found
