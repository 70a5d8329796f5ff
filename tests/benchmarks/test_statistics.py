"""Percentiles and the summary of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.bottleneck import warnings
from benchmarks.load.driver import LoadResult
from benchmarks.load.statistics import Latency, percentile, summarize
from benchmarks.load.trace import Chunk, Trace


@given(values=st.lists(st.floats(0, 100), min_size=1), share=st.integers(1, 100).map(lambda percent: percent / 100))
def test_percentile_is_the_smallest_value_that_covers_the_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values)


def test_percentiles_of_a_hundred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]


def test_summary_separates_answers_from_failures() -> None:
    answered = Trace(0.0, 0.1, 1.1, (Chunk(0.6, 1, None), Chunk(1.1, 3, None)), 8, 3)
    failed = [Trace(0.0, 0.0, 0.2, (Chunk(0.1, 1, None),), 0, 9, kind, "why") for kind in ("dropped", "dropped", "http_500")]
    summary = summarize(LoadResult(2.0, (answered, *failed), cpu_share=0.25))
    assert (summary.num_requests, summary.num_answered) == (4, 1)
    assert summary.errors == {"dropped": 2, "http_500": 1}
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.num_output_tokens) == (0.5, 1.5, 3)
    assert summary.ttft == Latency(0.5, 0.5, 0.5, 0.5)
    assert summary.tpot == summary.itl == Latency(0.25, 0.25, 0.25, 0.25)
    assert summary.chunk_gap == Latency(0.5, 0.5, 0.5, 0.5)
    assert summary.lag and summary.lag.p99_s == 0.1


def test_nothing_answered() -> None:
    summary = summarize(LoadResult(1.0, (Trace(0.0, 0.0, 0.1, error_kind="connect"),)))
    assert summary.ttft is summary.itl is summary.e2e is None
    assert summary.output_tokens_per_s == 0.0


@pytest.mark.parametrize(("cpu_share", "lag_s", "num_warnings"), [(0.5, 0.001, 0), (0.81, 0.001, 1), (0.1, 0.2, 1), (0.99, 0.2, 2)])
def test_says_when_it_is_the_bottleneck(cpu_share: float, lag_s: float, num_warnings: int) -> None:
    assert len(warnings(summarize(LoadResult(1.0, (Trace(0.0, lag_s, 0.5),), cpu_share)))) == num_warnings
