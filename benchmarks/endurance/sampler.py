"""What every process of a cluster holds, every few seconds, in bounded memory.

Each process has one `History`. When it is full, every second sample is dropped, and from then on every second one that comes: a soak of
days needs no more than one of hours.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from benchmarks.endurance.process_sample import ProcessSample
from benchmarks.endurance.roles import is_replica, role_of
from deploy.process_tree import ProcessId, descendants

MAX_SAMPLES: Final = 4096
COLUMNS: Final = tuple(ProcessSample.__dataclass_fields__)


class Columns:
    """Parallel series under names, with `time_s`, seconds after the start; at most `MAX_SAMPLES` long.

    All of their memory is taken at once: the process that samples is sampled too, and must not grow by its samples.
    """

    def __init__(self, *names: str) -> None:
        self._columns = {name: array("d", bytes(8 * MAX_SAMPLES)) for name in ("time_s", *names)}
        self._length = 0
        self._stride = 1  # of how many samples that come one is kept
        self._num_seen = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> array[float]:
        """A copy."""
        return self._columns[name][: self._length]

    def add(self, time_s: float, *values: float) -> None:
        """Appends one sample, or lets it be."""
        keep = self._num_seen % self._stride == 0
        self._num_seen += 1
        if not keep:
            return
        for column, value in zip(self._columns.values(), (time_s, *values), strict=True):
            column[self._length] = value
        self._length += 1
        if self._length == MAX_SAMPLES:
            self._length //= 2
            self._stride *= 2
            for column in self._columns.values():
                column[: self._length] = column[::2]

    def after(self, time_s: float) -> dict[str, array[float]]:
        """What came at `time_s` and later."""
        first = bisect_left(self._columns["time_s"], time_s, hi=self._length)
        return {name: column[first : self._length] for name, column in self._columns.items()}


@dataclass(slots=True)
class History:
    """One process over time."""

    role: str
    pid: int
    is_replica: bool
    is_cluster: bool = True  # not a process that only looks on
    columns: Columns = field(default_factory=lambda: Columns(*COLUMNS))
    ended: bool = False

    def add(self, time_s: float, sample: ProcessSample) -> None:
        """Appends one sample, or lets it be."""
        self.columns.add(time_s, *(getattr(sample, name) for name in COLUMNS))

    def __len__(self) -> int:
        return len(self.columns)

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
            history = self._histories[process] = History(role, process.pid, is_replica(process.pid), process not in self._others)
        elif history.role != role:  # an idle worker of Ray became an actor, a fork became its program
            history.role, history.is_replica = role, is_replica(process.pid)
        history.add(time_s, sample)
