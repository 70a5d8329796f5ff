"""How much memory this process may still allocate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # version 2, version 1


def available_bytes() -> int:
    """The machine's available memory, within the limit of our container."""
    return min([_machine_bytes(), *_container_limits()])


def _machine_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _container_limits() -> list[int]:
    texts = [path.read_text().strip() for path in _CGROUP_LIMITS if path.exists()]
    return [int(text) for text in texts if text != "max"]
