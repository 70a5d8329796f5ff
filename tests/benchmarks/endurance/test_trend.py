"""The slope and its error against series whose slope is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.endurance.trend import MIN_SAMPLES, Trend

INTERVAL_S = 5.0


def noise(rng: np.random.Generator, num: int, correlation: float) -> np.ndarray:
    """AR(1) with variance 1."""
    values = np.empty(num)
    values[0] = rng.normal()
    for index in range(1, num):
        values[index] = correlation * values[index - 1] + math.sqrt(1 - correlation**2) * rng.normal()
    return values


def test_a_line_has_its_slope_and_no_error() -> None:
    times_s = np.arange(100) * INTERVAL_S
    trend = Trend.of(list(times_s), list(7.0 + 0.25 * times_s))
    assert trend is not None
    assert trend.slope == pytest.approx(0.25)
    assert trend.standard_error == pytest.approx(0.0, abs=1e-9)
    assert trend.lower > 0.2


def test_uneven_blocks_and_times_do_not_bend_it() -> None:
    times_s = np.cumsum(np.random.default_rng(0).uniform(1, 9, size=101))
    trend = Trend.of(list(times_s), list(3.0 - 2.0 * times_s))
    assert trend is not None
    assert trend.slope == pytest.approx(-2.0)
    assert trend.lower < trend.slope + 1e-9 < 0


def test_the_error_is_that_of_least_squares_for_independent_noise() -> None:
    """Then the textbook is right, and blocks lose little."""
    rng = np.random.default_rng(1)
    times_s = np.arange(400) * INTERVAL_S
    spread = float(((times_s - times_s.mean()) ** 2).sum())
    errors = [trend.standard_error for _ in range(200) if (trend := Trend.of(list(times_s), list(rng.normal(size=400))))]
    assert float(np.mean(errors)) == pytest.approx(math.sqrt(1 / spread), rel=0.1)


@pytest.mark.parametrize("correlation", [0.0, 0.8, 0.9])
def test_correlated_noise_is_seldom_called_growth(correlation: float) -> None:
    """One-sided 2.5 %, where the textbook error of 300 samples errs up to one time in three."""
    rng = np.random.default_rng(2)
    times_s = list(np.arange(300) * INTERVAL_S)
    trends = [Trend.of(times_s, list(noise(rng, 300, correlation))) for _ in range(1000)]
    assert sum(trend is not None and trend.lower > 0 for trend in trends) / 1000 <= 0.055


def test_growth_is_found_in_correlated_noise() -> None:
    rng = np.random.default_rng(3)
    times_s = np.arange(300) * INTERVAL_S
    trends = [Trend.of(list(times_s), list(0.01 * times_s + noise(rng, 300, 0.9))) for _ in range(100)]
    assert all(trend is not None and trend.lower > 0 for trend in trends)


def test_few_samples_have_no_trend() -> None:
    assert Trend.of([0.0] * (MIN_SAMPLES - 1), [0.0] * (MIN_SAMPLES - 1)) is None
