"""The search finds the highest step that attains, whatever it is and wherever it begins, and in few runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.comparison.rate_grid import RateGrid


def _search(first: int, limit: int) -> tuple[int, list[int]]:
    grid, tried = RateGrid(first, max_probes=60), []
    while (step := grid.next_step()) is not None:
        assert step >= 1
        tried.append(step)
        grid.tell(step, step <= limit)
    return grid.highest_attained, tried


@given(first=st.integers(1, 60), limit=st.integers(0, 60))
def test_it_finds_the_limit_and_tries_nothing_twice(first: int, limit: int) -> None:
    found, tried = _search(first, limit)
    assert found == limit
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("limit", [1, 4, 11, 30])
def test_two_runs_are_enough_where_the_limit_is_known(limit: int) -> None:
    found, tried = _search(limit, limit)
    assert found == limit
    assert len(tried) <= 2 + limit // 8


def test_a_server_without_a_limit_ends_the_search() -> None:
    grid = RateGrid(5)
    while (step := grid.next_step()) is not None:
        grid.tell(step, attained=True)
    assert grid.num_probes == grid.max_probes == 16
    assert grid.highest_attained == 97
