"""Rounds: who runs when, what a ratio is of, and what becomes of those who fail."""

from __future__ import annotations

import pytest

from benchmarks.comparison.alternation import Outcome, alternate
from benchmarks.comparison.failure import PeerError, last_words
from benchmarks.comparison.figures import ratio_table, reasons, record


def test_everyone_runs_once_a_round_and_the_order_turns() -> None:
    calls: list[tuple[str, int]] = []

    def measure(name: str, index: int) -> float:
        calls.append((name, index))
        return 1.0

    alternate(["a", "b", "c"], 3, measure)
    assert calls == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("c", 2)]


def test_who_fails_is_out_with_its_reason_and_keeps_its_rounds() -> None:
    def measure(name: str, index: int) -> float:
        if name == "b" and index == 1:
            raise PeerError("no memory")
        return {"a": 6.0, "b": 3.0}[name] * (index + 1)

    outcome = alternate(["a", "b"], 3, measure)
    assert outcome.rounds == [{"a": 6.0, "b": 3.0}, {"a": 12.0}, {"a": 18.0}]
    assert outcome.errors == {"b": "no memory"}
    assert outcome.ratios("a", "b") == [2.0]


def test_a_ratio_is_of_one_round() -> None:
    """The machine was three times slower in the second one."""
    outcome = Outcome([{"a": 60.0, "b": 30.0}, {"a": 20.0, "b": 8.0}, {"a": 60.0, "b": 20.0}])
    assert outcome.ratios("a", "b") == [2.0, 2.5, 3.0]
    assert outcome.median("a") == 60.0
    assert outcome.best(["b", "missing"]) == "b"
    assert outcome.best(["missing"]) is None


def test_a_base_of_zero_has_no_ratio() -> None:
    assert Outcome([{"a": 1.0, "b": 0.0}]).ratios("a", "b") == []


def test_the_table_names_who_is_missing() -> None:
    outcomes = {"decode-1": Outcome([{"a": 6.0, "b": 3.0}, {"a": 5.0, "b": 2.0}], {"c": "illegal instruction"})}
    lines = ratio_table(outcomes, ["a", "b", "c", "d"], ["b"], "tokens/s").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["case", "who", "tokens/s", "/ b"]
    assert cells[2:] == [
        ["decode-1", "a", "5.5", "2.25 (2.00 to 2.50)"],
        ["decode-1", "b", "2.5", "-"],
        ["decode-1", "c", "failed", "-"],
        ["decode-1", "d", "failed", "-"],
    ]
    assert reasons(outcomes, {"d": "not installed"}) == ["d: not installed", "c, decode-1: illegal instruction"]


def test_the_record_has_rounds_ratios_and_reasons() -> None:
    outcomes = {"mixed": Outcome([{"a": 6.0, "b": 3.0}], {"c": "gone"})}
    found = record(outcomes, ["a", "b", "c"], ["b"], {"d": "not installed"})
    assert found["errors"] == {"d": "not installed"}
    assert found["cases"]["mixed"] == {
        "medians": {"a": 6.0, "b": 3.0},
        "ratios": {"a / b": 2.0},
        "rounds": [{"a": 6.0, "b": 3.0}],
        "errors": {"c": "gone"},
    }


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("Traceback\n  x\nImportError: no AVX-512\nwarning: bye\n", "ImportError: no AVX-512"),
        ("one\ntwo\n\n", "two"),
        ("", "it said nothing"),
    ],
)
def test_the_reason_in_a_programs_output(said: str, found: str) -> None:
    assert last_words(said) == found
