"""What is called growth, and what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from benchmarks.endurance.process_sample import ProcessSample
from benchmarks.endurance.sampler import Columns, History
from benchmarks.endurance.verdict import growth_of, growths_of, is_overloaded

MIB = 2**20
EMPTY = ProcessSample(rss_bytes=300 * MIB, pss_bytes=0, anonymous_bytes=200 * MIB, shmem_bytes=0, num_open_files=50, num_threads=9)


def history(change: Callable[[float], dict[str, int]], *, num_samples: int = 120, is_replica: bool = True) -> History:
    """Samples of `EMPTY` with `change` of the hours since the start, over half an hour."""
    found = History("Router", 7, is_replica)
    for index in range(num_samples):
        found.add(index * 15.0, dataclasses.replace(EMPTY, **change(index * 15 / 3600)))
    return found


def test_heap_that_grows_is_told_with_its_slope() -> None:
    growth = growth_of(history(lambda hours: {"anonymous_bytes": int((200 + 30 * hours) * MIB)}), warm_up_s=300)
    assert growth.verdict == "memory grows"
    figures = growth.as_json()
    assert figures["anonymous_mib"]["slope_per_hour"] == pytest.approx(30, rel=1e-3)
    assert figures["anonymous_mib"]["start"] == pytest.approx(202.5)
    assert figures["num_samples"] == 100


def test_less_than_one_percent_an_hour_is_flat() -> None:
    assert growth_of(history(lambda hours: {"anonymous_bytes": int((200 + 1.9 * hours) * MIB)}), 300).verdict == "flat"


def test_open_files_that_grow_are_told() -> None:
    assert growth_of(history(lambda hours: {"num_open_files": 50 + int(100 * hours)}), 300).verdict == "open files grows"


def test_a_pool_that_fills_is_flat() -> None:
    def fill(hours: float) -> dict[str, int]:
        return {"rss_bytes": int((300 + 900 * hours) * MIB), "shmem_bytes": int(900 * hours * MIB)}

    growth = growth_of(history(fill), 300)
    assert growth.verdict == "flat"
    assert growth.as_json()["rss_mib"]["slope_per_hour"] == pytest.approx(900, rel=1e-3)


def test_what_grows_while_it_warms_up_is_flat() -> None:
    assert growth_of(history(lambda hours: {"anonymous_bytes": int(min(200 + 1200 * hours, 300) * MIB)}), 300).verdict == "flat"


def test_a_replica_that_ended_is_a_problem_and_a_helper_is_not() -> None:
    replica, helper = (history(lambda _: {}, is_replica=is_replica) for is_replica in (True, False))
    replica.ended = helper.ended = True
    assert [growth.problems for growth in growths_of([replica, helper], 300)] == [["ended"], []]


def test_what_only_looks_on_is_told_and_not_judged() -> None:
    onlooker = history(lambda hours: {"anonymous_bytes": int((200 + 30 * hours) * MIB)}, is_replica=False)
    onlooker.is_cluster = False
    growth = growth_of(onlooker, 300)
    assert growth.problems == [] and growth.verdict == "not judged"
    assert growth.as_json()["anonymous_mib"]["slope_per_hour"] == pytest.approx(30, rel=1e-3)


def test_too_short_to_judge() -> None:
    growth = growth_of(history(lambda hours: {"anonymous_bytes": int((200 + 900 * hours) * MIB)}, num_samples=30), 300)
    assert growth.verdict == "too few samples"
    assert not growths_of([history(lambda _: {}, num_samples=5)], warm_up_s=300), "gone before the warm-up was over"


def test_a_queue_that_grows_is_overload_and_one_that_sways_is_not() -> None:
    growing, swaying = Columns("num_running"), Columns("num_running")
    for index in range(120):
        growing.add(index * 5.0, index // 4)
        swaying.add(index * 5.0, index % 9)
    assert is_overloaded(growing, warm_up_s=60)
    assert not is_overloaded(swaying, warm_up_s=60)
    assert not is_overloaded(growing, warm_up_s=9999)
