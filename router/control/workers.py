"""Who the workers are: the last report of each, by its stable id.

A worker id with a new incarnation ends the old life for good: reports of that life which arrive late are ignored. A worker that is
silent for `report_timeout_s`, or that a gateway could not reach since its last report, gets no new work but keeps its placements (it may
only be slow); after `forget_s` it is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from cluster.types import WorkerLoad, WorkerRole, WorkerState, request_id_of

_FORGET_FACTOR: Final = 10
_MAX_RETIRED: Final = 4096
_STATE_ORDER: Final = (WorkerState.STARTING, WorkerState.RUNNING, WorkerState.DRAINING)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's last report and when it came."""

    load: WorkerLoad
    heard_at_s: float
    live_ids: frozenset[str]  # request ids of `load.live_requests`, whichever attempt
    is_suspect: bool = False  # found unreachable since its last report

    @property
    def incarnation(self) -> str:
        return self.load.incarnation


class WorkerRegistry:
    """The last report of each worker."""

    def __init__(self, report_timeout_s: float) -> None:
        self._report_timeout_s = report_timeout_s
        self._forget_s = _FORGET_FACTOR * report_timeout_s
        self._workers: dict[str, Worker] = {}
        self._by_incarnation: dict[str, Worker] = {}
        self._retired: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def get(self, incarnation: str) -> Worker | None:
        return self._by_incarnation.get(incarnation)

    def is_retired(self, incarnation: str) -> bool:
        """This life has ended: its successor has reported."""
        return incarnation in self._retired

    def report(self, load: WorkerLoad, now_s: float) -> str | None:
        """Takes a report; the incarnation that it put an end to, if any."""
        if self.is_retired(load.incarnation):
            return None
        before = self._workers.get(load.worker_id)
        if before is None or before.incarnation != load.incarnation:
            self._store(load, now_s)
            return None if before is None else self._retire(before)
        self._store(_later(before.load, load), now_s)
        return None

    def suspect(self, incarnation: str) -> None:
        """A gateway could not reach it: it has to report before it gets work again."""
        worker = self._by_incarnation.get(incarnation)
        if worker is not None:
            self._keep(replace(worker, is_suspect=True))

    def forget_silent(self, now_s: float) -> list[str]:
        """Drops the workers that are silent for long; their incarnations. One that was only cut off may report again."""
        gone = [worker for worker in self._workers.values() if now_s - worker.heard_at_s > self._forget_s]
        for worker in gone:
            del self._workers[worker.load.worker_id]
            del self._by_incarnation[worker.incarnation]
        return [worker.incarnation for worker in gone]

    def is_heard(self, worker: Worker, now_s: float) -> bool:
        return now_s - worker.heard_at_s <= self._report_timeout_s

    def takes_work(self, worker: Worker, now_s: float) -> bool:
        """Running, heard of lately, and not known to be out of reach."""
        return worker.load.state is WorkerState.RUNNING and self.is_heard(worker, now_s) and not worker.is_suspect

    def num_reported(self, role: WorkerRole) -> int:
        return sum(worker.load.role is role for worker in self._workers.values())

    def _store(self, load: WorkerLoad, now_s: float) -> None:
        self._keep(Worker(load, now_s, frozenset(map(request_id_of, load.live_requests))))

    def _keep(self, worker: Worker) -> None:
        self._workers[worker.load.worker_id] = worker
        self._by_incarnation[worker.incarnation] = worker

    def _retire(self, worker: Worker) -> str:
        del self._by_incarnation[worker.incarnation]
        self._retired[worker.incarnation] = None
        while len(self._retired) > _MAX_RETIRED:
            self._retired.popitem(last=False)
        return worker.incarnation


def _later(known: WorkerLoad, load: WorkerLoad) -> WorkerLoad:
    """The later of two reports of one life, whatever order they came in: steps only grow, and a state never goes back."""
    state = max(known.state, load.state, key=_STATE_ORDER.index)
    newest = known if load.num_steps < known.num_steps else load
    return replace(newest, state=state)
