"""Service level objectives: bounds on the latencies of one request. A request is good when it was answered within all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.load.driver import LoadResult
from benchmarks.load.trace import Trace

NAMES: Final = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds, both ends included; None bounds nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met_by(self, trace: Trace) -> bool:
        """False for a failed request. An answer of one token has no TPOT to exceed."""
        bounds = ((self.ttft_s, trace.ttft_s), (self.tpot_s, trace.tpot_s), (self.e2e_s, trace.e2e_s))
        return trace.answered and all(bound is None or value is None or value <= bound for bound, value in bounds)

    def attainment(self, traces: Sequence[Trace]) -> float:
        """The share of good requests among all sent but the interrupted; 0 when there is none."""
        judged = [trace for trace in traces if trace.ended_by_server]
        return sum(map(self.is_met_by, judged)) / len(judged) if judged else 0.0

    def goodput(self, result: LoadResult) -> float:
        """Good requests/s."""
        return sum(map(self.is_met_by, result.traces)) / result.duration_s


def parse_slo(bounds: Sequence[str]) -> Slo | None:
    """Of `ttft=2.0` and the like; None without any.

    Raises:
        ValueError: an unknown name, one given twice, or no positive number of seconds.
    """
    found: dict[str, float] = {}
    for text in bounds:
        name, _, value = text.partition("=")
        if name not in NAMES or f"{name}_s" in found:
            raise ValueError(f"{text!r}: expected one each of {', '.join(f'{known}=SECONDS' for known in NAMES)}")
        found[f"{name}_s"] = _seconds(value, text)
    return Slo(**found) if found else None


def _seconds(value: str, text: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r}: expected a positive number of seconds")
    return seconds
