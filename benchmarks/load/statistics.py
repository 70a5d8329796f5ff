"""The figures of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load.driver import LoadResult


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed: a value of the list, nothing between two."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share - 1e-9) - 1)]


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency over all answers of a run, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Latency | None:
        """None without values."""
        if not values:
            return None
        found = (sum(values) / len(values), *(percentile(values, share) for share in (0.5, 0.9, 0.99)))
        return cls(*(round(value, 5) for value in found))


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are over the whole run, from its start to the last answer; latencies and tokens are of answered requests alone."""

    num_requests: int
    num_answered: int
    errors: dict[str, int]  # by kind
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    chunk_gap: Latency | None  # what `vllm bench serve` calls ITL: between chunks, however many tokens they hold
    e2e: Latency | None
    lag: Latency | None  # how late requests were sent
    cpu_share: float  # of one core, used by the load generator


def summarize(result: LoadResult) -> Summary:
    answered = result.answered
    return Summary(
        num_requests=len(result.traces),
        num_answered=len(answered),
        errors=dict(Counter(trace.error_kind for trace in result.traces if trace.error_kind)),
        duration_s=round(result.duration_s, 3),
        requests_per_s=round(len(answered) / result.duration_s, 4),
        output_tokens_per_s=round(result.output_tokens_per_s, 2),
        num_prompt_tokens=sum(trace.num_prompt_tokens for trace in answered),
        num_output_tokens=sum(trace.num_output_tokens for trace in answered),
        ttft=Latency.of([trace.ttft_s for trace in answered]),
        tpot=Latency.of([trace.tpot_s for trace in answered if trace.tpot_s is not None]),
        itl=Latency.of([itl_s for trace in answered for itl_s in trace.itls_s]),
        chunk_gap=Latency.of([gap_s for trace in answered for gap_s in trace.gaps_s]),
        e2e=Latency.of([trace.e2e_s for trace in answered]),
        lag=Latency.of([trace.lag_s for trace in result.traces]),
        cpu_share=round(result.cpu_share, 3),
    )


def first_errors(result: LoadResult) -> dict[str, str]:
    """The first message of each kind of error."""
    found: dict[str, str] = {}
    for trace in result.traces:
        if trace.error_kind:
            found.setdefault(trace.error_kind, trace.error)
    return found
