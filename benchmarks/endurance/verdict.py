"""Whether a process grows.

A series is *flat* when its slope is not above zero with 97.5 % confidence, or is below 1 % of its mean an hour. Judged are anonymous
memory and open files; of RSS the slope is told too, since shared pages come as the KV pool is touched for the first time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.endurance.sampler import Columns, History
from benchmarks.endurance.trend import Trend

FLAT_SHARE_PER_HOUR: Final = 0.01
MIB: Final = 2**20
_HOUR_S: Final = 3600
_JUDGED: Final = {"anonymous_bytes": "memory", "num_open_files": "open files"}


@dataclass(frozen=True, slots=True)
class Growth:
    """One column of one process after the warm-up; `trend` is None when too few samples are left."""

    start: float
    end: float
    mean: float
    trend: Trend | None

    @classmethod
    def of(cls, times_s: Sequence[float], values: Sequence[float]) -> Growth:
        """At least one value."""
        return cls(values[0], values[-1], statistics.fmean(values), Trend.of(times_s, values))

    @property
    def grows(self) -> bool:
        return self.trend is not None and self.trend.lower > 0 and self.trend.slope * _HOUR_S >= FLAT_SHARE_PER_HOUR * self.mean

    def as_json(self, unit: float = 1.0) -> dict[str, Any]:
        """Values in `unit`; slopes in it an hour."""
        found: dict[str, Any] = {"start": round(self.start / unit, 2), "end": round(self.end / unit, 2)}
        if self.trend is not None:
            per_hour = _HOUR_S / unit
            found |= {
                "slope_per_hour": round(self.trend.slope * per_hour, 3),
                "standard_error": round(self.trend.standard_error * per_hour, 3),
            }
        return found


@dataclass(frozen=True, slots=True)
class ProcessGrowth:
    """One process, by column."""

    name: str
    is_replica: bool
    is_cluster: bool
    ended: bool
    num_samples: int
    columns: dict[str, Growth]

    @property
    def problems(self) -> list[str]:
        """Why the process is not flat. What only looks on has none."""
        if not self.is_cluster:
            return []
        found = [f"{what} grows" for column, what in _JUDGED.items() if self.columns and self.columns[column].grows]
        return found + (["ended"] if self.ended and self.is_replica else [])

    @property
    def verdict(self) -> str:
        """`flat`, the problems, or why there is none."""
        if not self.is_cluster:
            return "not judged"
        if self.problems:
            return ", ".join(self.problems)
        if self.ended:
            return "ended"
        has_trend = self.columns and self.columns["anonymous_bytes"].trend is not None
        return "flat" if has_trend else "too few samples"

    def as_json(self) -> dict[str, Any]:
        units = {column: MIB if column.endswith("_bytes") else 1 for column in self.columns}
        figures = {column.replace("_bytes", "_mib"): growth.as_json(units[column]) for column, growth in self.columns.items()}
        return {"name": self.name, "verdict": self.verdict, "num_samples": self.num_samples, **figures}


def growth_of(history: History, warm_up_s: float) -> ProcessGrowth:
    """What `history` shows after the first `warm_up_s`."""
    after = history.columns.after(warm_up_s)
    times_s = after.pop("time_s")
    columns = {name: Growth.of(times_s, values) for name, values in after.items() if values}
    return ProcessGrowth(history.name, history.is_replica, history.is_cluster, history.ended, len(times_s), columns)


def is_overloaded(num_running: Columns, warm_up_s: float) -> bool:
    """Whether requests came faster than they were answered: then what waits fills memory, and its growth says nothing."""
    after = num_running.after(warm_up_s)
    return len(after["time_s"]) > 0 and Growth.of(after["time_s"], after["num_running"]).grows


def growths_of(histories: Iterable[History], warm_up_s: float) -> list[ProcessGrowth]:
    """Of every process that was there after the warm-up."""
    return [growth for history in histories if (growth := growth_of(history, warm_up_s)).columns or growth.problems]
