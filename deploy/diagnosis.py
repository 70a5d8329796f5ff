"""What is off in a cluster, told from the books of its processes alone. Pure.

The books are gathered process by process, so what moves between two of them may look wrong for a moment; what is wrong stays. Therefore
a finding counts when an earlier gathering, a second or more before, has it too. What a busy process holds is of before its present step:
whether it gives that back shows after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Final

from cluster.books import ClusterBooks, ProcessBooks

CONFIRM_S: Final = 1.0  # between two gatherings: longer than a finished request takes to be forgotten everywhere
_WORKERS: Final = ("prefill", "decode", "colocated")
_MAX_FILES_SHARE: Final = 0.8  # of the limit


class Trouble(StrEnum):
    """What can be off."""

    MISSING = "missing"  # a deployment or a replica does not answer
    FAULT = "fault"  # a process's own books are wrong
    HELD = "held"  # something is held and no request runs
    ORPHAN = "orphan"  # a worker works on a request that neither gateway nor router knows
    UNLISTED = "unlisted"  # the router holds a request that no gateway knows
    FORGOTTEN = "forgotten"  # a gateway holds a request that the router does not know
    SEGMENT = "segment"  # shared memory of a KV pool that is no more
    PEER = "peer"  # a prefill worker that is no more, still known to a decode worker
    MEMFD = "memfd"  # descriptors of KV pools beyond those of the mappings and the owner
    FILES = "files"  # open files near the limit


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is off. The text may change while it stays the same thing."""

    trouble: Trouble
    where: str  # the process or the deployment
    subject: str
    text: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.where} {self.text}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict over one gathering, and maybe an earlier one."""

    findings: tuple[Finding, ...]
    num_running: int
    is_settled: bool  # no process is busy, and nothing looks off that is not confirmed

    @property
    def is_balanced(self) -> bool:
        return not self.findings

    @property
    def is_idle(self) -> bool:
        """Balanced, and nothing is held anywhere."""
        return self.is_balanced and self.is_settled and self.num_running == 0

    @property
    def verdict(self) -> str:
        if not self.is_balanced:
            return "off:"
        if self.is_idle:
            return "balanced: idle"
        if self.num_running == 0:
            return "balanced: the last request has just ended"
        return f"balanced: {self.num_running} request{'s' if self.num_running > 1 else ''} running"

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {finding}" for finding in self.findings)])


def diagnose(books: ClusterBooks, earlier: ClusterBooks | None = None) -> Diagnosis:
    """What is off in `books`; with an `earlier` gathering, only what was off in that one too."""
    found = tuple(_suspects(books))
    is_busy = any(process.is_busy for process in books.processes)
    if earlier is None:
        return Diagnosis(found, _num_running(books), is_settled=not is_busy)
    before = frozenset(_suspects(earlier))
    confirmed = tuple(finding for finding in found if finding in before)
    return Diagnosis(confirmed, _num_running(books), is_settled=not is_busy and len(confirmed) == len(found))


def _suspects(books: ClusterBooks) -> Iterator[Finding]:
    yield from (Finding(Trouble.MISSING, name, "", f"is missing: {reason}") for name, reason in books.missing.items())
    for process in books.processes:
        yield from (Finding(Trouble.FAULT, _name(process), "", f"is at fault: {fault}") for fault in process.faults)
        yield from _files(process)
    if _num_running(books) == 0:
        yield from chain.from_iterable(_held(process) for process in books.processes if not process.is_busy)
    if not books.missing.keys() & {"Gateway", "Router"}:
        yield from _requests(books)
    if "Prefill" not in books.missing:
        yield from _pools(books)


def _num_running(books: ClusterBooks) -> int:
    """Requests that gateways and router know of; a gateway's calls without a request yet count too."""
    num_calls = sum(process.held.get("requests", 0) for process in _of(books, "gateway"))
    return max(len(_known(books, "gateway", "router")), num_calls)


def _held(process: ProcessBooks) -> Iterator[Finding]:
    for name, number in process.held.items():
        if number:
            yield Finding(Trouble.HELD, _name(process), name, f"holds {name} {number} and no request is running")


def _requests(books: ClusterBooks) -> Iterator[Finding]:
    gateways, routers = _known(books, "gateway"), _known(books, "router")
    for process in _of(books, *_WORKERS):
        for request in set(process.requests) - gateways - routers if not process.is_busy else ():
            yield Finding(Trouble.ORPHAN, _name(process), request, f"works on request {request}, which neither gateway nor router knows")
    for process in _of(books, "router"):
        for request in set(process.requests) - gateways:
            yield Finding(Trouble.UNLISTED, _name(process), request, f"holds request {request}, which no gateway knows")
    for process in _of(books, "gateway"):
        for request in set(process.requests) - routers:
            yield Finding(Trouble.FORGOTTEN, _name(process), request, f"holds request {request}, which the router does not know")


def _pools(books: ClusterBooks) -> Iterator[Finding]:
    """Every pool's segment belongs to a prefill worker that lives, and is open in that one alone."""
    owners = _of(books, "prefill")
    owned = {name for process in owners for name in process.pools}
    lives = {process.name for process in owners}
    for process in books.processes:
        if process.kind == "prefill" and len(process.pools) > 1:
            yield Finding(Trouble.SEGMENT, _name(process), "", f"maps {len(process.pools)} KV pools, it has one")
        for name, size in process.pools.items():
            if name not in owned:
                yield Finding(Trouble.SEGMENT, _name(process), name, f"maps {size / 2**20:.0f} MiB of a KV pool that no prefill worker has")
        for peer in set(process.peers) - lives:
            yield Finding(Trouble.PEER, _name(process), peer, f"still has the prefill worker {peer} as a peer, which is no more")


def _files(process: ProcessBooks) -> Iterator[Finding]:
    state = process.state
    expected = len(process.pools) + (process.kind == "prefill")  # each mapping keeps one, and the owner hands one out
    if process.num_pool_files > expected:
        text = f"has {process.num_pool_files} descriptors of KV pools open, {expected} are expected"
        yield Finding(Trouble.MEMFD, _name(process), "", text)
    num_files = sum(state.open_files.values())
    if num_files > _MAX_FILES_SHARE * state.max_open_files:
        yield Finding(Trouble.FILES, _name(process), "", f"has {num_files} files open, the limit is {state.max_open_files}")


def _of(books: ClusterBooks, *kinds: str) -> list[ProcessBooks]:
    return [process for process in books.processes if process.kind in kinds]


def _known(books: ClusterBooks, *kinds: str) -> frozenset[str]:
    return frozenset(chain.from_iterable(process.requests for process in _of(books, *kinds)))


def _name(process: ProcessBooks) -> str:
    return f"{process.kind} {process.process}"


def in_order(processes: Iterable[ProcessBooks]) -> list[ProcessBooks]:
    """By the way of a request, then by name."""
    way = ("gateway", "router", *_WORKERS)
    return sorted(processes, key=lambda process: (way.index(process.kind) if process.kind in way else len(way), process.process))
