"""A run with a stop and its control, at the same tokens of the same streams.

A stream's tokens come slower the longer it is, so neither run is compared with itself: each token that a stream got during the stop is
set against the one at the same position of the same stream in the control. The streams are asked the same with the same seeds, so all
their tokens are the same too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.interruption.stop import Stop
from benchmarks.interruption.timed_stream import Gap, TimedStream
from benchmarks.load.statistics import percentile


@dataclass(frozen=True, slots=True)
class Sample:
    """Of both runs, the inter-token latency at the tokens that are compared, and the longest gap that one of them ended. In seconds."""

    control_itls_s: tuple[float, ...] = ()
    stop_itls_s: tuple[float, ...] = ()
    control_longest_s: float = 0.0
    stop_longest_s: float = 0.0

    @classmethod
    def joined(cls, samples: Iterable[Sample]) -> Sample:
        """All of them as one."""
        found = list(samples)
        return cls(
            tuple(itl_s for sample in found for itl_s in sample.control_itls_s),
            tuple(itl_s for sample in found for itl_s in sample.stop_itls_s),
            max((sample.control_longest_s for sample in found), default=0.0),
            max((sample.stop_longest_s for sample in found), default=0.0),
        )

    def figures(self) -> dict[str, Any]:
        """Medians, 99th percentiles and longest gaps; None where there is no token to compare."""
        if not self.stop_itls_s:
            return {"tokens": 0, "ratio": None, "ratio_p99": None, "control": None, "stop": None}
        control, stop = _latency(self.control_itls_s, self.control_longest_s), _latency(self.stop_itls_s, self.stop_longest_s)
        return {
            "tokens": len(self.stop_itls_s),
            "ratio": round(stop["itl_p50_s"] / control["itl_p50_s"], 3),
            "ratio_p99": round(stop["itl_p99_s"] / control["itl_p99_s"], 3),
            "control": control,
            "stop": stop,
        }


def _latency(itls_s: Sequence[float], longest_s: float) -> dict[str, float]:
    found = {"itl_p50_s": percentile(itls_s, 0.5), "itl_p99_s": percentile(itls_s, 0.99), "longest_gap_s": longest_s}
    return {name: round(seconds, 5) for name, seconds in found.items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both runs; the streams of one are in the order of the other's."""

    stop: Stop
    streams: Sequence[TimedStream]
    control: Sequence[TimedStream]

    def sample(self) -> Sample:
        """Of the streams that went on."""
        both = zip(self.streams, self.control, strict=True)
        return Sample.joined(self._sample(stream, control) for stream, control in both if not self.stop.goes_through(stream))

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        stopped = [stream for stream in self.streams if self.stop.goes_through(stream)]
        return {
            "streams_stopped": len(stopped),
            "streams_resumed": sum(stream.has_tokens(self.stop.ended_s, float("inf")) for stream in stopped),
            "failures": sorted(stream.failure for stream in self.streams if stream.failure is not None),
            **self.sample().figures(),
        }

    def _sample(self, stream: TimedStream, control: TimedStream) -> Sample:
        during = _by_position(gap for gap in stream.gaps() if self.stop.overlaps(gap))
        at_rest = _by_position(control.gaps())
        positions = sorted(during.keys() & at_rest.keys())
        return Sample(
            tuple(at_rest[position].itl_s for position in positions),
            tuple(during[position].itl_s for position in positions),
            max((at_rest[position].length_s for position in positions), default=0.0),
            max((gap.length_s for gap in during.values()), default=0.0),
        )


def control_spread(pairs: Sequence[Pair]) -> float | None:
    """The slowest control's median over the fastest's: a ratio within it is the machine's own unrest. None of fewer than two controls."""
    medians = [percentile(sample.control_itls_s, 0.5) for pair in pairs if (sample := pair.sample()).control_itls_s]
    return round(max(medians) / min(medians), 3) if len(medians) > 1 else None


def _by_position(gaps: Iterable[Gap]) -> dict[int, Gap]:
    return {position: gap for gap in gaps for position in gap.positions}
