"""What one process of the cluster holds, and whether its own books are right: what `baton doctor` gathers (promise P2)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.process_state import ProcessState, process_name
from cluster.types import request_id_of

POOL_MEMFD: Final = "baton-kv"  # the name of every KV pool's shared memory file; libraries have files of their own
_MAX_FAULT_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class ProcessBooks:
    """One process at one moment."""

    kind: str  # prefill, decode, colocated, router or gateway
    name: str  # its life: incarnation of a worker, epoch of a router, id of a gateway
    held: dict[str, int]  # what must all be 0 in an idle cluster
    faults: tuple[str, ...] = ()  # what its own checks found wrong
    requests: tuple[str, ...] = ()  # ids of the requests that it holds something of
    peers: tuple[str, ...] = ()  # incarnations of the prefill workers whose pools it reads
    is_busy: bool = False  # in a long step: `held` and `requests` are those before it
    process: str = field(default_factory=process_name)
    state: ProcessState = field(default_factory=ProcessState.now)

    @property
    def pools(self) -> dict[str, int]:
        """The segments that are KV pools, its own or those of peers: name → bytes."""
        return {name: size for name, size in self.state.segments.items() if name.startswith(f"{POOL_MEMFD}:")}

    @property
    def num_pool_files(self) -> int:
        """Open descriptors of KV pools."""
        return self.state.open_files.get(f"memfd:{POOL_MEMFD}", 0)


@dataclass(frozen=True, slots=True)
class ClusterBooks:
    """The books of all processes, gathered at about one moment."""

    processes: tuple[ProcessBooks, ...]
    missing: dict[str, str] = field(default_factory=dict)  # deployment → why it, or a replica of it, did not answer


def faults_of(*checks: Callable[[], None]) -> tuple[str, ...]:
    """What `checks`, which raise AssertionError, found wrong: one text for each that failed."""
    faults = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            faults.append(_text(error)[:_MAX_FAULT_CHARS])
    return tuple(faults)


def request_ids(keys: Iterable[str]) -> tuple[str, ...]:
    """The request ids of `Request.key`s, whichever attempt, in order."""
    return tuple(sorted(set(map(request_id_of, keys))))


def _text(error: AssertionError) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return str(error) or f"{where.name}: {where.line}"
