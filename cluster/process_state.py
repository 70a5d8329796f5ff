"""What this process holds of the machine, as the kernel counts it. Reads Linux's `/proc`."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SELF: Final = Path("/proc/self")
_MEMFD: Final = re.compile(r"^/memfd:(.+?)(?: \(deleted\))?$")
_BRACKETS: Final = re.compile(r"^(?:anon_inode:)?\[?(\w+)")  # `socket:[1]`, `pipe:[2]`, `anon_inode:[eventfd]`


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One moment of one process.

    A segment is an anonymous shared memory file that is mapped or open. Its name ends with its inode, so the process that made it and
    those that map it give it the same name.
    """

    open_files: dict[str, int]  # by kind: socket, pipe, eventfd, …; shared memory as `memfd:NAME`; `file` is all that has a path
    max_open_files: int
    segments: dict[str, int]  # name → bytes
    rss_bytes: int
    num_threads: int

    @classmethod
    def now(cls) -> ProcessState:
        """This process."""
        targets = _fd_targets()
        return cls(
            open_files=dict(Counter(map(_kind, targets.values()))),
            max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            segments=_open_segments(targets) | _mapped_segments(),
            rss_bytes=int((_SELF / "statm").read_text().split()[1]) * resource.getpagesize(),
            num_threads=sum(1 for _ in (_SELF / "task").iterdir()),
        )


def process_name() -> str:
    """Names this process in the whole cluster: its host and its id."""
    return f"{socket.gethostname()}-{os.getpid()}"  # not once at import: a fork has another pid


def _fd_targets() -> dict[int, str]:
    targets: dict[int, str] = {}
    for link in (_SELF / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as the descriptor of the listing itself is
            targets[int(link.name)] = str(link.readlink())
    return targets


def _kind(target: str) -> str:
    if target.startswith("/"):
        memfd = _MEMFD.match(target)
        return f"memfd:{memfd[1]}" if memfd else "file"
    found = _BRACKETS.match(target)
    return found[1] if found else "other"


def _open_segments(targets: dict[int, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, target in targets.items():
        if match := _MEMFD.match(target):
            with suppress(OSError):  # closed meanwhile
                stat = os.fstat(number)
                found[f"{match[1]}:{stat.st_ino}"] = stat.st_size
    return found


def _mapped_segments() -> dict[str, int]:
    found: Counter[str] = Counter()
    for line in (_SELF / "maps").read_text().splitlines():
        # start-end, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and (match := _MEMFD.match(fields[5])):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found[f"{match[1]}:{fields[4]}"] += end - start
    return dict(found)
