"""Which passages are struck, and what a strike does."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from cluster.errors import BatonError, NoCapacity, TransferError
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.faults.rules import FaultInjectionConfig
from cluster.types import WorkerRole

NUM_PASSAGES = 60
COUNTS = st.fixed_dictionaries(
    {
        "probability": st.sampled_from((0.1, 0.5, 1.0)),
        "every": st.integers(1, 7),
        "after": st.integers(0, 20),
        "max_count": st.none() | st.integers(1, 5),
    }
)


def injector(*rules: dict[str, Any], seed: int = 0, role: WorkerRole = WorkerRole.DECODE, replica: int = 0) -> FaultInjector:
    config = FaultInjectionConfig.model_validate({"seed": seed, "rules": rules})
    return FaultInjector(config, role=role, replica=replica, registry=CollectorRegistry())


def drops(counts: dict[str, Any], point: FaultPoint = FaultPoint.COMMIT) -> dict[str, Any]:
    return {"point": point, "action": "drop", **counts}


def struck(faults: FaultInjector, point: FaultPoint = FaultPoint.COMMIT, num_passages: int = NUM_PASSAGES) -> list[int]:
    """The numbers of the passages that were dropped, from 1."""

    async def pass_by() -> list[int]:
        found = []
        for number in range(1, num_passages + 1):
            try:
                await faults.reach(point)
            except BatonError:
                found.append(number)
        return found

    return asyncio.run(pass_by())


@settings(deadline=None)
@given(COUNTS, st.integers())
def test_the_same_seed_strikes_the_same(counts: dict[str, Any], seed: int) -> None:
    assert struck(injector(drops(counts), seed=seed)) == struck(injector(drops(counts), seed=seed))


@settings(deadline=None)
@given(COUNTS, st.integers())
def test_counts(counts: dict[str, Any], seed: int) -> None:
    found = struck(injector(drops(counts), seed=seed))
    due = range(counts["after"] + counts["every"], NUM_PASSAGES + 1, counts["every"])
    assert set(found) <= set(due)
    if counts["max_count"] is not None:
        assert len(found) <= counts["max_count"]
    if counts["probability"] == 1.0:
        assert found == list(due)[: counts["max_count"]]


@settings(deadline=None)
@given(COUNTS, st.integers())
def test_a_bound_does_not_shift_what_comes_before_it(counts: dict[str, Any], seed: int) -> None:
    unbounded = struck(injector(drops({**counts, "max_count": None}), seed=seed))
    assert struck(injector(drops(counts), seed=seed)) == unbounded[: counts["max_count"]]


@settings(deadline=None)
@given(st.integers(), st.floats(0.02, 0.98))
def test_a_probability_is_kept(seed: int, probability: float) -> None:
    num_passages = 2000
    num_struck = len(struck(injector(drops({"probability": probability}), seed=seed), num_passages=num_passages))
    deviation = (num_passages * probability * (1 - probability)) ** 0.5
    assert abs(num_struck - num_passages * probability) < 6 * deviation


def test_each_worker_point_and_seed_has_chances_of_its_own() -> None:
    half = {"probability": 0.5}
    found = [
        struck(injector(drops(half))),
        struck(injector(drops(half), seed=1)),
        struck(injector(drops(half), replica=1)),
        struck(injector(drops(half), role=WorkerRole.PREFILL)),
        struck(injector(drops(half, FaultPoint.RELEASE)), FaultPoint.RELEASE),
    ]
    assert all(found.count(one) == 1 for one in found), found


@settings(deadline=None)
@given(COUNTS, COUNTS, st.integers())
def test_two_rules_at_a_point_strike_as_each_alone(counts: dict[str, Any], others: dict[str, Any], seed: int) -> None:
    registry = CollectorRegistry()
    rules = [drops(counts), {"point": FaultPoint.COMMIT, "action": "delay", "delay_s": 1e-9, **others}]
    both = FaultInjector(FaultInjectionConfig.model_validate({"seed": seed, "rules": rules}), role=WorkerRole.DECODE, registry=registry)
    assert struck(both) == struck(injector(drops(counts), seed=seed))


def test_other_points_are_left_alone() -> None:
    faults = injector(drops({}))
    assert not [point for point in FaultPoint if point is not FaultPoint.COMMIT and struck(faults, point, 1)]


@pytest.mark.parametrize("point", FaultPoint)
async def test_what_is_lost_is_the_error_that_its_caller_would_see(point: FaultPoint) -> None:
    with pytest.raises(NoCapacity, match=point) as caught:
        await injector(drops({}, point)).reach(point)
    is_call_to_prefill = point in (FaultPoint.FETCH_START, FaultPoint.FETCH_CHUNK, FaultPoint.COMMIT)
    assert type(caught.value) is (TransferError if is_call_to_prefill else NoCapacity)


async def test_a_delay_lets_others_go_on() -> None:
    faults = injector({"point": "offer", "action": "delay", "delay_s": 0.2})
    started_s = time.monotonic()
    await asyncio.gather(*(faults.reach(FaultPoint.OFFER) for _ in range(3)))
    assert 0.2 <= time.monotonic() - started_s < 0.5


async def test_one_byte_of_a_message_is_changed() -> None:
    faults = injector({"point": "first_token", "action": "corrupt", "every": 2})
    message = bytes(range(200))
    assert await faults.carry(FaultPoint.FIRST_TOKEN, message) == message
    found = await faults.carry(FaultPoint.FIRST_TOKEN, message)
    assert len(found) == len(message)
    assert sum(one != other for one, other in zip(found, message, strict=True)) == 1


async def test_one_byte_of_the_blocks_that_arrived_is_changed() -> None:
    faults = injector({"point": "fetch.chunk", "action": "corrupt"})
    blocks = torch.zeros(10, 64, dtype=torch.uint8)
    await faults.arrive(FaultPoint.FETCH_CHUNK, blocks, [7, 2])
    assert int((blocks != 0).sum()) == 1
    assert bool(blocks[[7, 2]].any())


def test_a_kill_is_kill_9() -> None:
    code = (
        "import asyncio; from cluster.faults.injector import FaultInjector; from cluster.faults.rules import FaultInjectionConfig;"
        "rules = [{'point': 'commit', 'action': 'kill', 'after': 1}];"
        "faults = FaultInjector(FaultInjectionConfig.model_validate({'rules': rules}));"
        "run = lambda: asyncio.run(faults.reach(rules[0]['point'])); run(); print('alive', flush=True); run(); print('alive still')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "alive\n"), ended.stderr


def test_faults_are_counted_and_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    config = FaultInjectionConfig.model_validate({"rules": [drops({"every": 20})]})
    with caplog.at_level(logging.WARNING):
        faults = FaultInjector(config, role=WorkerRole.DECODE, registry=registry)
    assert "FAULT INJECTION IS ON: point=commit action=drop every=20" in caplog.text
    struck(faults)
    assert registry.get_sample_value("baton_injected_faults_total", {"point": "commit", "action": "drop"}) == 3.0


@pytest.mark.parametrize(
    "passage",
    [
        lambda faults: faults.reach(FaultPoint.COMMIT),
        lambda faults: faults.carry(FaultPoint.FIRST_TOKEN, b"ticket"),
        lambda faults: faults.arrive(FaultPoint.FETCH_CHUNK, torch.zeros(1, 8, dtype=torch.uint8), [0]),
    ],
)
async def test_without_rules_nothing_happens(passage: Callable[[FaultInjector], Awaitable[Any]], caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    for faults in (NO_FAULTS, FaultInjector(FaultInjectionConfig(), role=WorkerRole.DECODE, registry=registry)):
        assert await passage(faults) in (None, b"ticket")
    assert generate_latest(registry) == b""
    assert not caplog.records
