"""The views of all workers that take work now: what placement decides on.

A view is made again only when its worker has reported or its placements have changed (both are immutable values, so identity tells),
which keeps a pump cheap in a large cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.types import WorkerLoad, WorkerRole
from router.control.claims import WorkerView, view_of
from router.control.live_set import LivePlacement, LiveSet
from router.control.placement import Pools
from router.control.workers import Worker, WorkerRegistry


@dataclass(frozen=True, slots=True)
class _Entry:
    worker: Worker
    placed: tuple[LivePlacement, ...]
    view: WorkerView


class LoadBook:
    """Views by pool, as of the last `update`."""

    def __init__(self, roles: Iterable[WorkerRole], registry: WorkerRegistry, live: LiveSet) -> None:
        self._roles = tuple(roles)
        self._registry = registry
        self._live = live
        self._entries: dict[str, _Entry] = {}
        self._taking_work: list[Worker] = []

    def update(self, now_s: float) -> None:
        """Takes up who takes work now. Changed placements need no update: `pools` follows them."""
        self._taking_work = [w for w in self._registry if w.load.role in self._roles and self._registry.takes_work(w, now_s)]
        names = {worker.incarnation for worker in self._taking_work}
        self._entries = {name: entry for name, entry in self._entries.items() if name in names}

    def pools(self) -> Pools:
        """The views, all placements made so far included."""
        pools: dict[WorkerRole, list[WorkerView]] = {role: [] for role in self._roles}
        for worker in self._taking_work:
            pools[worker.load.role].append(self._view(worker))
        return pools

    def loads(self) -> dict[WorkerRole, list[WorkerLoad]]:
        """The reports alone."""
        loads: dict[WorkerRole, list[WorkerLoad]] = {role: [] for role in self._roles}
        for worker in self._taking_work:
            loads[worker.load.role].append(worker.load)
        return loads

    def check_integrity(self) -> None:
        """Raises AssertionError unless the credits that placement sees are those that the live placements leave."""
        for worker in self._taking_work:
            placed = [live for live in self._live if worker.incarnation in live.incarnations]
            found, expected = self._view(worker), view_of(worker, placed)
            assert found == expected, f"placement sees {found} of {worker.incarnation}, the live set says {expected}"

    def _view(self, worker: Worker) -> WorkerView:
        placed = self._live.on(worker.incarnation)
        entry = self._entries.get(worker.incarnation)
        if entry is None or entry.worker is not worker or entry.placed is not placed:
            entry = _Entry(worker, placed, view_of(worker, placed))
            self._entries[worker.incarnation] = entry
        return entry.view
