"""Laws of lengths: within their bounds, and as they were named."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.lengths import Fixed, Lognormal, Uniform, parse_length


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("512", Fixed(512)),
        ("uniform:1:9", Uniform(1, 9)),
        ("uniform:3:3", Uniform(3, 3)),
        ("lognormal:300:0.8:4096", Lognormal(300, 0.8, 4096)),
    ],
)
def test_parses_each_form(text: str, length: object) -> None:
    assert parse_length(text) == length


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "1.5",
        "many",
        "uniform",
        "uniform:9:1",
        "uniform:0:5",
        "lognormal:1:x:5",
        "lognormal:1:-1:5",
        "lognormal:0:1:5",
        "5:5",
    ],
)
def test_refuses_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="is no length"):
        parse_length(text)


@given(low=st.integers(1, 500), span=st.integers(0, 500), sigma=st.floats(0, 3), seed=st.integers())
def test_lengths_stay_within_bounds(low: int, span: int, sigma: float, seed: int) -> None:
    rng = random.Random(seed)
    assert low <= Uniform(low, low + span).draw(rng) <= low + span
    assert 1 <= Lognormal(low, sigma, low + span).draw(rng) <= low + span
    assert Fixed(low).draw(rng) == low


def test_laws_have_their_median() -> None:
    rng = random.Random(0)
    for length, median in ((Uniform(100, 300), 200), (Lognormal(200, 0.5, 10_000), 200)):
        assert statistics.median(length.draw(rng) for _ in range(4000)) == pytest.approx(median, rel=0.05)
