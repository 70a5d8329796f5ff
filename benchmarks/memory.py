"""What processes hold in memory. Reads Linux's `/proc`."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Anonymous memory alone: without files and shared pools, which are mapped once and shown everywhere.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


def command_of(pid: int) -> str:
    """Its title; empty when there is no such process (any more)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    except OSError:
        return ""
