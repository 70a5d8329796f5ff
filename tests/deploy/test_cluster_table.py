"""The table of `baton status`, made of what a real router says of its books."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.types import WorkerState
from deploy.cluster_table import Sample, bar, cluster_lines, duration
from tests.router.control.builders import Cluster, load, prefill_load, request, settle

WIDTH = 200
MODEL = {"name": "tiny", "max_model_len": 8192, "system_fingerprint": "baton-int8"}


def sample(cluster: Cluster, taken_s: float | None = None) -> Sample:
    """As the gateway answers; taken at the router's own time."""
    books: dict[str, Any] = {"model": MODEL, **cluster.router.snapshot()}
    return Sample(cluster.clock.now_s if taken_s is None else taken_s, books)


def cells_of(lines: list[str], worker: str) -> dict[str, str]:
    """The row of `worker` by column; columns are told apart by two spaces and more."""
    index = next(i for i, line in enumerate(lines) if line.startswith(f"  {worker} "))
    header = next(line for line in reversed(lines[:index]) if line.lstrip().startswith("worker "))
    names = [name for name in header.split("  ") if name.strip()]
    values = [value.strip() for value in lines[index].split("  ") if value.strip() and not set(value.strip()) <= set("█░")]
    return dict(zip((name.strip() for name in names), values, strict=True))


def two_looks(**counters: int) -> tuple[Cluster, Sample]:
    """A cluster, and a look at it before its workers computed anything."""
    cluster = Cluster()
    cluster.report(prefill_load(), load("d"))
    return cluster, sample(cluster)


def test_rates_are_over_the_time_between_the_reports() -> None:
    cluster, first = two_looks()
    cluster.clock.advance(2.0)
    cluster.report(
        prefill_load(), load("d", num_tokens_total=90, num_steps=30, num_blocks_owned=24, num_blocks_leased=1, num_seqs_running=3)
    )
    cluster.clock.advance(0.5)  # the age of that report
    lines = cluster_lines(sample(cluster), first, WIDTH)
    decode = cells_of(lines, "d")
    assert decode.items() >= {"tokens/s": "45.0", "steps/s": "15.0", "KV used": "25/100", "run": "3", "age": "0.5 s"}.items()
    assert cells_of(lines, "p").items() >= {"tokens/s": "0.0", "state": "running", "life": "p#1"}.items()


def test_a_rate_needs_two_reports_of_one_life() -> None:
    cluster, first = two_looks()
    assert cells_of(cluster_lines(first, None, WIDTH), "d")["tokens/s"] == "-"
    cluster.clock.advance(0.2)
    assert cells_of(cluster_lines(sample(cluster), first, WIDTH), "d")["tokens/s"] == "-", "the same report"
    cluster.report(prefill_load(), load("d", incarnation="d#2", num_tokens_total=5))
    assert cells_of(cluster_lines(sample(cluster), first, WIDTH), "d").items() >= {"life": "d#2", "tokens/s": "-"}.items()


def test_states_and_readiness() -> None:
    cluster = Cluster()
    cluster.report(prefill_load(), load("d", state=WorkerState.DRAINING))
    lines = cluster_lines(sample(cluster), None, WIDTH)
    assert cells_of(lines, "d")["state"] == "draining"
    assert lines[0] == "model   tiny, context 8,192, baton-int8"
    assert lines[1].startswith("router  epoch 1, running, NOT READY: ")
    cluster.clock.advance(100)
    assert cells_of(cluster_lines(sample(cluster), None, WIDTH), "p").items() >= {"state": "silent", "age": "2 min"}.items()


def test_a_pool_without_workers() -> None:
    cluster = Cluster()
    cluster.report(load("d"))
    lines = cluster_lines(sample(cluster), None, WIDTH)
    assert lines[lines.index("prefill: 0 owned, 0 leased, 0 cached, 0 free KV blocks") + 1] == "  no worker"


async def test_queue_and_placements() -> None:
    cluster = Cluster()
    cluster.report(prefill_load(), load("d"))
    placed = asyncio.create_task(cluster.router.admit(request("a")))
    await settle()
    cluster.report(load("d", num_seqs_running=8))
    waiting = asyncio.create_task(cluster.router.admit(request("b", num_prompt_tokens=48)))
    await settle()
    cluster.clock.advance(1.5)
    lines = cluster_lines(sample(cluster), None, WIDTH)
    assert "queue   requests 1, tokens 48" in lines
    assert "        normal: requests 1, tokens 48, oldest waits 1.5 s" in lines
    assert "live    prefill 1, decode 0" in lines
    for task in (placed, waiting):
        task.cancel()
    await asyncio.gather(placed, waiting, return_exceptions=True)


@pytest.mark.parametrize("width", [1, 20, 60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    cluster, first = two_looks()
    cluster.report(load("a-worker-with-a-long-name", num_blocks_owned=50))
    lines = cluster_lines(sample(cluster), first, width)
    assert max(map(len, lines)) <= width
    assert any("█" in line for line in lines) is (width >= 100)


def test_a_terminal_of_80_columns_has_room_for_all() -> None:
    cluster = Cluster()
    cluster.report(load("m8d7d6l5", incarnation="c5f45320", num_blocks=728, num_blocks_owned=500, num_seqs_running=64))
    lines = cluster_lines(sample(cluster), None, 80)
    assert any("█" in line and line.endswith("-        -") for line in lines), lines


def test_bar() -> None:
    assert [bar(share, 4) for share in (0.0, 0.001, 0.5, 1.0)] == ["░░░░", "█░░░", "██░░", "████"]


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0.04, 99.0, 600.0, 7200.0)] == ["0.0 s", "99.0 s", "10 min", "2 h"]
