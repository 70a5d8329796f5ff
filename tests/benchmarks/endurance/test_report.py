"""What a soak says."""

from __future__ import annotations

import pytest

from benchmarks.endurance.load import Counts
from benchmarks.endurance.report import as_json, print_figures
from benchmarks.endurance.sampler import Columns, History
from benchmarks.endurance.session import Soaked
from benchmarks.endurance.verdict import growths_of
from tests.benchmarks.endurance.test_verdict import MIB, history


def soaked(histories: list[History], idle: list[History]) -> Soaked:
    return Soaked(1.0, None, 1800.0, Counts(), histories, Columns("num_running"), [], idle, interrupted=False)


def growing(mib_per_hour: float) -> History:
    return history(lambda hours: {"anonymous_bytes": int((200 + mib_per_hour * hours) * MIB)})


def test_growth_without_requests_is_told_beside_that_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    found = soaked([growing(30.0)], [growing(12.0)])
    growths = growths_of(found.histories, 300)
    print_figures(found, growths, [])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "Router" in line)
    assert row.index("+30.0") < row.index("+12.0")
    (idle,) = as_json(found, growths, [])["idle"]
    assert idle["anonymous_mib"]["slope_per_hour"] == pytest.approx(12, rel=1e-3)


def test_who_asks_for_no_idle_time_gets_no_figures_of_it() -> None:
    found = soaked([growing(30.0)], [])
    assert as_json(found, growths_of(found.histories, 300), [])["idle"] == []
