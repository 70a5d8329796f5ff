"""What is said of a soak: a table of the processes, the counts, and the same as JSON."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.endurance.session import Soaked
from benchmarks.endurance.verdict import MIB, Growth, ProcessGrowth, growths_of, is_overloaded
from benchmarks.report import table

_HEADER: Final = (
    "process", "RSS (MiB)", "anonymous (MiB)", "MiB/h", "idle MiB/h", "shmem (MiB)", "open files", "files/h", "threads", "verdict"
)  # fmt: skip
_HOUR_S: Final = 3600


def print_figures(soaked: Soaked, growths: list[ProcessGrowth], problems: list[str]) -> None:
    """The table first, and what is wrong last."""
    idle = {growth.name: growth for growth in growths_of(soaked.idle, 0.0)}
    print(table(_HEADER, [_row(growth, idle.get(growth.name)) for growth in growths if growth.columns]))
    counts = soaked.counts
    print(
        f"{counts.num_sent} requests in {soaked.duration_s:.0f} s: {counts.num_answered} answered, {counts.cancelled.total()} cancelled "
        f"({counts.cancelled.total() / max(1, counts.num_sent):.0%}), {counts.errors.total()} failed"
    )
    for kind, message in counts.first_errors.items():
        print(f"{counts.errors[kind]} failed with {kind}: {message}")
    for problem in problems:
        print(f"problem: {problem}")


def problems_of(soaked: Soaked, growths: list[ProcessGrowth], warm_up_s: float) -> list[str]:
    """Why the soak did not pass; empty if it did."""
    found = [f"{growth.name}: {problem}" for growth in growths for problem in growth.problems]
    if is_overloaded(soaked.num_running, warm_up_s):
        found.insert(
            0, "more and more requests were running: the rate is above the capacity, and memory grows with what waits; ask for less"
        )
    found += [f"{number} requests failed with {kind}" for kind, number in soaked.counts.errors.items()]
    return found + [f"the books do not balance in the end: {finding}" for finding in soaked.left]


def as_json(soaked: Soaked, growths: list[ProcessGrowth], problems: list[str]) -> dict[str, Any]:
    counts = soaked.counts
    return {
        "rate": round(soaked.rate, 4),
        "capacity": soaked.capacity and round(soaked.capacity, 4),
        "duration_s": round(soaked.duration_s, 1),
        "interrupted": soaked.interrupted,
        "num_sent": counts.num_sent,
        "answered": dict(counts.answered),
        "cancelled": dict(counts.cancelled),
        "errors": dict(counts.errors),
        "books_left": soaked.left,
        "problems": problems,
        "processes": [growth.as_json() for growth in growths],
        "idle": [growth.as_json() for growth in growths_of(soaked.idle, 0.0)],
    }


def _row(growth: ProcessGrowth, idle: ProcessGrowth | None) -> tuple[str, ...]:
    columns = growth.columns
    return (
        growth.name,
        _range(columns["rss_bytes"], MIB),
        _range(columns["anonymous_bytes"], MIB),
        _slope(columns["anonymous_bytes"], MIB),
        _slope(idle.columns["anonymous_bytes"], MIB) if idle and idle.columns else "",
        _range(columns["shmem_bytes"], MIB),
        _range(columns["num_open_files"]),
        _slope(columns["num_open_files"]),
        _range(columns["num_threads"]),
        growth.verdict,
    )


def _range(growth: Growth, unit: float = 1.0) -> str:
    start, end = (f"{value / unit:.{0 if unit == 1.0 else 1}f}" for value in (growth.start, growth.end))
    return start if start == end else f"{start} → {end}"


def _slope(growth: Growth, unit: float = 1.0) -> str:
    """With the margin of the 95 % interval."""
    if growth.trend is None:
        return ""
    per_hour = _HOUR_S / unit
    return f"{growth.trend.slope * per_hour:+.1f} ± {growth.trend.margin * per_hour:.1f}"
