"""The search finds the limit of any server that attains below one rate and misses above it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.search import RateSearch


def run(search: RateSearch, limit: float) -> list[float]:
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.tell(rate, rate <= limit)
    return tried


@given(limit=st.floats(0.01, 1000), first=st.floats(0.01, 1000), precision=st.floats(0.01, 0.5))
def test_closes_in_on_the_limit(limit: float, first: float, precision: float) -> None:
    search = RateSearch(first, precision, max_probes=100)
    tried = run(search, limit)
    assert search.is_settled
    assert search.highest_attained <= limit < search.lowest_missed <= search.highest_attained * (1 + precision)
    assert len(set(tried)) == len(tried)
    away, inside = abs(math.log2(limit / first)), math.log2(1 / math.log2(1 + precision))
    assert len(tried) <= away + inside + 4


@given(first=st.floats(0.01, 100), max_probes=st.integers(1, 20))
def test_ends_without_a_limit(first: float, max_probes: int) -> None:
    never, always = RateSearch(first, max_probes=max_probes), RateSearch(first, max_probes=max_probes)
    assert len(run(never, 0.0)) == len(run(always, math.inf)) == max_probes
    assert (never.highest_attained, always.lowest_missed) == (0.0, math.inf)
    assert not never.is_settled
    assert not always.is_settled
