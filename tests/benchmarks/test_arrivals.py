"""Send times: seeded, in order, at the mean rate."""

from __future__ import annotations

from itertools import groupby, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.arrivals import Arrivals, Bursts, Poisson

RATES = st.floats(0.01, 1000)


@given(rate=RATES, size=st.integers(1, 20), seed=st.integers())
def test_times_are_seeded_and_in_order(rate: float, size: int, seed: int) -> None:
    for arrivals in (Poisson(rate), Bursts(rate, size)):
        times = list(islice(arrivals.times_s(seed), 50))
        assert times == list(islice(arrivals.times_s(seed), 50))
        assert times[0] > 0
        assert all(earlier <= later for earlier, later in pairwise(times))


@pytest.mark.parametrize("arrivals", [Poisson(4.0), Bursts(4.0, 8)])
def test_the_mean_rate_is_the_one_asked_for(arrivals: Arrivals) -> None:
    *_, last_s = islice(arrivals.times_s(1), 40_000)
    assert 40_000 / last_s == pytest.approx(4.0, rel=0.05)


def test_poisson_gaps_vary_as_much_as_their_mean() -> None:
    times = [0.0, *islice(Poisson(10.0).times_s(3), 20_000)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(1.0, rel=0.05)


@given(size=st.integers(1, 20), seed=st.integers())
def test_bursts_are_whole(size: int, seed: int) -> None:
    bursts = groupby(islice(Bursts(1.0, size).times_s(seed), 10 * size))
    assert [len(list(burst)) for _, burst in bursts] == [size] * 10


def test_another_seed_is_another_schedule() -> None:
    assert next(Poisson(1.0).times_s(1)) != next(Poisson(1.0).times_s(2))
