"""What many samples of a case say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from benchmarks.steps.bench import Sample
from benchmarks.steps.case import Case, DecodeCase
from benchmarks.steps.limits import MachineLimits


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case on one kernel set."""

    case: Case
    kernels: str  # name of the set
    scheme: str
    samples: Sequence[Sample]

    @property
    def step_s(self) -> float:
        """Median."""
        return median(sample.duration_s for sample in self.samples)

    @property
    def rest_s(self) -> float:
        """Median of what a sample spends outside the kernels: scheduling, tensors, sampling, events."""
        return median(sample.duration_s - sample.kernels_s for sample in self.samples)

    @property
    def gb_per_s(self) -> float:
        """Of the bytes that have to be read."""
        return mean(sample.cost.read_bytes for sample in self.samples) / self.step_s / 1e9

    @property
    def gop_per_s(self) -> float:
        """Of the linears and attention."""
        return mean(sample.cost.operations for sample in self.samples) / self.step_s / 1e9

    def figures(self, limits: MachineLimits | None) -> dict[str, Any]:
        """What is published of it."""
        peak = limits.peak_for(self.scheme) if limits else None
        return {
            "case": "decode" if isinstance(self.case, DecodeCase) else "prefill",
            **asdict(self.case),
            "kernels": self.kernels,
            "step_s": self.step_s,
            "min_step_s": min(sample.duration_s for sample in self.samples),
            "kernels_s": median(sample.kernels_s for sample in self.samples),
            "rest_s": self.rest_s,
            "tokens_per_s": self.case.num_tokens / self.step_s,
            "read_bytes": round(mean(sample.cost.read_bytes for sample in self.samples)),
            "gb_per_s": self.gb_per_s,
            "share_of_read": self.gb_per_s / limits.read_gb_per_s if limits else None,
            "gop_per_s": self.gop_per_s,
            "share_of_peak": self.gop_per_s / peak if peak else None,
            "num_samples": len(self.samples),
        }
