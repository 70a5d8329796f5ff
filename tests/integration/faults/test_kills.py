"""Processes of every kind are killed under load: who has no byte yet notices nothing, streams are told, and all comes back."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.integration.faults.asking import answers_of
from tests.integration.faults.clients import Way, connected
from tests.integration.faults.fault_report import FaultReport
from tests.integration.faults.fault_run import FaultRun, Load
from tests.integration.faults.processes import DEPLOYMENTS, PROXY, processes
from tests.integration.faults.questions import draw_questions
from tests.integration.served import Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

KINDS = (*DEPLOYMENTS, PROXY)
WAYS = (Way.WHOLE, Way.WHOLE, Way.STREAM, Way.GRPC)
MANY_WAYS = (Way.WHOLE, Way.WHOLE, Way.WHOLE, Way.STREAM, Way.GRPC)


async def check_kills(served: Served, load: Load, victims: tuple[str, ...], seed: int) -> FaultReport:
    """Runs `load` through the kills, and judges each request; what is left to say is how many may have been lost."""
    rng = random.Random(seed)
    questions = draw_questions(rng, 12)
    async with connected(served) as clients:
        answers = await answers_of(clients, questions)
    before = Counter(process.kind for process in processes(served))
    async with connected(served, retries=True) as clients:
        run = FaultRun(served, clients, questions, rng)
        await run.run(load, victims)
        report = FaultReport(run, answers)
        print(report)
        assert not report.complaints(), "\n".join([*report.complaints(), str(report)])
        await served.await_ready()
        assert await answers_of(clients, questions[:3]) == {question: answers[question] for question in questions[:3]}
    now = processes(served)
    assert Counter(process.kind for process in now) == before, "Serve has brought back what was killed"
    assert not {fault.process.pid for fault in run.faults} & {process.pid for process in now}
    assert Counter(fault.process.kind for fault in run.faults) == Counter(victims)
    await served.await_balance()
    return report


async def test_one_kill_of_each_kind(served: Served) -> None:
    """With one process of each kind every stream that has begun may end at each kill: how many have begun then is chance."""
    await check_kills(served, Load(num_requests=60, num_in_flight=8, ways=WAYS), KINDS, seed=1)


@pytest.mark.slow
async def test_two_kills_of_each_kind(serve_url: str) -> None:
    """Two processes of each kind but router and proxy. A kill of a gateway or proxy ends the streams that it carries, of the four in flight
    about one, and a worker's those that find no other in time; six such kills may cost six of the requests, and twelve is 2 %."""
    pool = {"kv_cache_bytes": "256MiB", "replicas": 2}
    with serving(serve_url, "kills", prefill=pool, decode=pool, gateway={"replicas": 2}) as served:
        await served.await_ready()
        report = await check_kills(served, Load(num_requests=600, num_in_flight=10, ways=MANY_WAYS), KINDS * 2, seed=2)
    assert report.share_right >= 0.98, str(report)
