"""What counts as a good request."""

from __future__ import annotations

import pytest

from benchmarks.load.driver import LoadResult
from benchmarks.load.slo import Slo, parse_slo
from benchmarks.load.trace import Chunk, Trace

GOOD = Trace(0.0, 0.0, 3.0, (Chunk(1.0, 1, None), Chunk(3.0, 1, None)), 8, 5)  # TTFT 1, TPOT 0.5, end-to-end 3


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_s=1.0, tpot_s=0.5, e2e_s=3.0), True),
        (Slo(ttft_s=0.99), False),
        (Slo(tpot_s=0.49), False),
        (Slo(e2e_s=2.99), False),
        (Slo(ttft_s=5.0, tpot_s=0.1), False),
    ],
)
def test_bounds_include_their_ends(slo: Slo, met: bool) -> None:
    assert slo.is_met_by(GOOD) is met


def test_failed_requests_count_as_missed() -> None:
    failed = Trace(0.0, 0.0, 0.1, error_kind="http_429")
    slo = Slo(ttft_s=2.0)
    assert not slo.is_met_by(failed)
    assert slo.attainment([GOOD, GOOD, GOOD, failed]) == 0.75
    assert slo.goodput(LoadResult(2.0, (GOOD, GOOD, GOOD, failed))) == 1.5
    assert slo.attainment([]) == 0.0


def test_one_token_has_no_tpot_to_exceed() -> None:
    assert Slo(tpot_s=0.001).is_met_by(Trace(0.0, 0.0, 3.0, (Chunk(1.0, 1, None),), 8, 1))


def test_parses() -> None:
    assert parse_slo([]) is None
    assert parse_slo(["ttft=2.0", "tpot=0.05"]) == Slo(ttft_s=2.0, tpot_s=0.05)


@pytest.mark.parametrize("bounds", [["ttft"], ["ttft=x"], ["ttft=0"], ["ttft=inf"], ["speed=1"], ["ttft=1", "ttft=2"]])
def test_refuses(bounds: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_slo(bounds)
