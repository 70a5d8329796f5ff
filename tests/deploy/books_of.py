"""Books as a healthy cluster of four processes tells them, to be made unhealthy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.books import ClusterBooks, ProcessBooks
from cluster.process_state import ProcessState

POOL_BYTES = 512 * 2**20


def process(kind: str, *, held: dict[str, int] | None = None, **changes: Any) -> ProcessBooks:
    """One process; of its state, `open_files` and `segments` may be given by name."""
    pool = {"baton-kv:7": POOL_BYTES} if kind in ("prefill", "decode") else {}
    pool_files = {"prefill": 2, "decode": 1}.get(kind, 0)
    files = {"socket": 20, "file": 5, **({"memfd:baton-kv": pool_files, "memfd:jit": 1} if pool_files else {})}
    state = ProcessState(
        open_files=changes.pop("open_files", files),
        max_open_files=1024,
        segments={"jit:3": 4096, **changes.pop("segments", pool)},
        rss_bytes=300 * 2**20,
        num_threads=30,
    )
    peers = ("prefill-life",) if kind == "decode" else ()
    books = ProcessBooks(kind, f"{kind}-life", {"blocks_owned": 0, **(held or {})}, process=f"host-{kind}", state=state, peers=peers)
    return replace(books, **changes)


def cluster(*others: ProcessBooks, missing: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> ClusterBooks:
    """The four, `others` in the place of those of their kind."""
    kinds = {kind: process(kind) for kind in ("gateway", "router", "prefill", "decode")}
    kinds |= {books.kind: books for books in others}
    return ClusterBooks(tuple(books for kind, books in kinds.items() if kind not in without), missing or {})
