"""The prefill pool is made smaller under load: the worker that leaves ends what it has begun, and no request notices."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

import pytest

from tests.integration.faults.asking import answers_of
from tests.integration.faults.clients import Way, connected
from tests.integration.faults.fault_report import FaultReport
from tests.integration.faults.fault_run import FaultRun, Load
from tests.integration.faults.processes import lives
from tests.integration.faults.questions import draw_questions
from tests.integration.served import Declared, declaring

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

DRAIN_TIMEOUT_S: Final = 15.0
NUM_BEFORE: Final = 15  # requests
NUM_AFTER: Final = 25


async def test_no_request_notices_that_a_prefill_worker_leaves(serve_url: str) -> None:
    rng = random.Random(3)
    questions = draw_questions(rng, 6)
    pool = {"kv_cache_bytes": "256MiB", "drain_timeout_s": DRAIN_TIMEOUT_S}
    with declaring(serve_url, "scaled", replicas={"Prefill": 2}, prefill=pool, decode=pool) as declared:
        served = declared.served
        await served.await_ready()
        async with connected(served) as clients:
            answers = await answers_of(clients, questions)
            others = {name: served.pids(name) for name in ("Gateway", "Router", "Decode")}
            run = FaultRun(served, clients, questions, rng)
            load = asyncio.create_task(run.run(Load(num_requests=NUM_BEFORE + NUM_AFTER, num_in_flight=8, ways=tuple(Way)), victims=()))
            while len(run.askings) < NUM_BEFORE:  # noqa: ASYNC110  # the run tells nobody
                await asyncio.sleep(0.05)
            left, took_s = await make_smaller(declared)
            num_after = NUM_BEFORE + NUM_AFTER - len(run.askings)
            await load
        report = FaultReport(run, answers)
        print(f"gone after {took_s:.1f} s, {num_after} requests before the load's end", report)
        assert not report.complaints(), str(report)
        assert num_after > 0, "the load must have gone on all the while"
        assert {name: served.pids(name) for name in others} == others, "only that pool has changed"
        assert served.pids("Prefill") == [left]
        await served.await_ready()
        await served.await_balance()


async def make_smaller(declared: Declared) -> tuple[int, float]:
    """The process of the worker that stays, and how long the other took to leave."""
    before = set(declared.served.pids("Prefill"))
    assert len(before) == 2
    started_s = time.monotonic()
    declared.scale({"Prefill": 1})
    while len(living := [pid for pid in before if lives(pid)]) > 1:
        assert time.monotonic() - started_s < DRAIN_TIMEOUT_S + 5, "the drain is bounded"
        await asyncio.sleep(0.05)
    return living[0], time.monotonic() - started_s
