"""What every process of a cluster holds, every few seconds, in bounded memory.

Each process has one `History`. When one is full it drops every second sample and from then on keeps every second one that comes, so that a
soak of days needs no more than one of hours.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from benchmarks.endurance.process_sample import ProcessSample
from benchmarks.endurance.roles import is_replica, role_of
from deploy.process_tree import ProcessId, descendants

MAX_SAMPLES: Final = 4096
COLUMNS: Final = tuple(ProcessSample.__dataclass_fields__)


def _columns() -> dict[str, array[float]]:
    return {name: array("d") for name in ("time_s", *COLUMNS)}


@dataclass(slots=True)
class History:
    """One process over time; `columns` are parallel, `time_s` is seconds after the start."""

    role: str
    pid: int
    is_replica: bool
    columns: dict[str, array[float]] = field(default_factory=_columns)
    ended: bool = False
    _stride: int = 1  # of how many samples that come one is kept
    _num_seen: int = 0

    def add(self, time_s: float, sample: ProcessSample) -> None:
        """Appends one sample, or lets it be."""
        keep = self._num_seen % self._stride == 0
        self._num_seen += 1
        if not keep:
            return
        self.columns["time_s"].append(time_s)
        for name in COLUMNS:
            self.columns[name].append(getattr(sample, name))
        if len(self.columns["time_s"]) == MAX_SAMPLES:
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            self._stride *= 2

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    @property
    def name(self) -> str:
        """Unique within a run."""
        return f"{self.role} {self.pid}"


class Sampler:
    """Samples `root`, all that is below it, and `others`."""

    def __init__(self, root: ProcessId, others: tuple[ProcessId, ...] = ()) -> None:
        self._root = root
        self._others = others
        self._histories: dict[ProcessId, History] = {}

    @property
    def histories(self) -> list[History]:
        """Of every process that was seen, those that ended too, by role."""
        return sorted(self._histories.values(), key=lambda history: (not history.is_replica, history.role, history.pid))

    def sample(self, time_s: float) -> None:
        """Looks at every process once; takes some milliseconds for each."""
        alive = {self._root, *self._others} | descendants(self._root.pid)
        for process in alive:
            with suppress(OSError):  # it ends between two reads
                self._sample(process, time_s)
        for process, history in self._histories.items():
            history.ended = not process.is_alive()

    def _sample(self, process: ProcessId, time_s: float) -> None:
        sample = ProcessSample.read(process.pid)
        role = role_of(process.pid)
        history = self._histories.get(process)
        if history is None:
            history = self._histories[process] = History(role, process.pid, is_replica(process.pid))
        elif history.role != role:  # an idle worker of Ray became an actor, a fork became its program
            history.role, history.is_replica = role, is_replica(process.pid)
        history.add(time_s, sample)
