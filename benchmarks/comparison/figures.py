"""One table of figures and ratios, and the same for the line of JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.comparison.alternation import Outcome
from benchmarks.report import table

Outcomes = Mapping[str, Outcome]  # by case


def ratio_table(outcomes: Outcomes, names: Sequence[str], bases: Sequence[str], unit: str) -> str:
    """A row for everyone in each case: the median figure, and against each of `bases` the median ratio with its range."""
    rows = [
        [case, name, _figure(outcome, name), *(_ratio(outcome, name, base) for base in bases)]
        for case, outcome in outcomes.items()
        for name in names
    ]
    return table(["case", "who", unit, *(f"/ {base}" for base in bases)], rows)


def reasons(outcomes: Outcomes, errors: Mapping[str, str]) -> list[str]:
    """A line for each figure that is missing, and why: those who did not start first."""
    found = [f"{name}: {error}" for name, error in errors.items()]
    return found + [f"{name}, {case}: {error}" for case, outcome in outcomes.items() for name, error in outcome.errors.items()]


def record(outcomes: Outcomes, names: Sequence[str], bases: Sequence[str], errors: Mapping[str, str]) -> dict[str, Any]:
    """Medians, ratios, all rounds, and the reasons for what is missing."""
    cases = {}
    for case, outcome in outcomes.items():
        pairs = {f"{name} / {base}": outcome.ratios(name, base) for base in bases for name in names if name != base}
        cases[case] = {
            "medians": {name: round(value, 3) for name in names if (value := outcome.median(name)) is not None},
            "ratios": {pair: round(statistics.median(found), 3) for pair, found in pairs.items() if found},
            "rounds": [{name: round(value, 3) for name, value in figures.items()} for figures in outcome.rounds],
            "errors": outcome.errors,
        }
    return {"cases": cases, "errors": dict(errors)}


def _figure(outcome: Outcome, name: str) -> str:
    value = outcome.median(name)
    return "failed" if value is None else f"{value:.4g}"


def _ratio(outcome: Outcome, name: str, base: str) -> str:
    found = outcome.ratios(name, base)
    if name == base or not found:
        return "-"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
