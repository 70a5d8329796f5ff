"""Faults at random points of the handoff, under load: under `recompute` no client notices those that leave the workers alive.

Chances. An attempt that fails is made again, at most `MAX_ATTEMPTS` times in a row without a new token, so a client sees an error only when
as many in a row fail. An attempt comes to about ten chances p of failing before its first new token: `_LOSSES` has nine, two of them at
`fetch.chunk`, which a prompt passes once or twice, and one at `first_token` that seldom matters (its ticket is used where the offer's is
not). A lost commit is asked for once more, and a lost `release` or `lease.renew` fails nothing. So one attempt fails with 1 - (1 - p)^10:
in the short form, p = 0.02, 0.18, and one of its 80 requests fails with a chance of 80 · 0.18^8 = 1e-4; in the long form, p = 0.01,
2,000 · 0.096^8 = 1e-5. With the default of three attempts 0.5 and 2 requests would fail: who loses one message in 50 needs more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import pytest

from tests.integration.faults.asking import Answer, Asking, answers_of
from tests.integration.faults.clients import Way, connected
from tests.integration.faults.fault_report import FaultReport
from tests.integration.faults.fault_run import FaultRun, Load
from tests.integration.faults.questions import Question, draw_questions
from tests.integration.served import Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

MAX_ATTEMPTS: Final = 8
POOL: Final = {"kv_cache_bytes": "256MiB"}
TRANSFER: Final = {"checksums": True, "lease_s": 3.0, "renew_interval_s": 0.3}
WAYS: Final = tuple(Way)
HONEST: Final = {"status", "event", "grpc"}  # an error of the table; not a broken connection, an end without a reason, or none at all

_LOSSES: Final = (
    ("offer", "drop"),
    ("offer", "corrupt"),
    ("first_token", "drop"),
    ("first_token", "corrupt"),
    ("follow", "drop"),
    ("follow", "corrupt"),
    ("fetch.start", "drop"),
    ("fetch.chunk", "drop"),
    ("fetch.chunk", "corrupt"),
    ("decode.taken", "drop"),
)
_DELAYS_S: Final = {
    "offer": 0.2,
    "first_token": 0.2,
    "follow": 0.2,
    "commit": 0.2,
    "release": 0.2,
    "decode.taken": 0.2,
    "decode.tokens": 0.1,
}
# Each life of a worker is safe for so many passages of a point, and dies soon after: 2,000 requests, and those made again, come to at most
# four such lives in each pool. (A request has about 20 messages with tokens.)
_SAFE_PASSAGES: Final = {"offer": 450, "first_token": 450, "release": 450, "fetch.chunk": 450, "commit": 450, "decode.tokens": 9000}


def chances(probability: float) -> list[dict[str, Any]]:
    """Delays, losses and damage at every point."""
    return [
        *({"point": point, "action": action, "probability": probability} for point, action in _LOSSES),
        {"point": "commit", "action": "drop", "probability": probability},
        {"point": "release", "action": "drop", "probability": probability},
        {"point": "decode.tokens", "action": "drop", "probability": probability / 10},  # of many messages a request
        *({"point": point, "action": "delay", "delay_s": delay_s, "probability": probability} for point, delay_s in _DELAYS_S.items()),
        {"point": "fetch.chunk", "action": "delay", "delay_s": 1.0, "probability": probability},  # so that leases are renewed
        {"point": "lease.renew", "action": "drop", "probability": 0.2},
    ]


async def right_answers(undisturbed: Served, questions: list[Question]) -> dict[Question, Answer]:
    """Of a cluster without faults."""
    async with connected(undisturbed) as clients:
        return await answers_of(clients, questions)


async def ask(served: Served, questions: list[Question], rng: random.Random, num_requests: int) -> FaultRun:
    """Of clients that try each request once."""
    async with connected(served) as clients:
        run = FaultRun(served, clients, questions, rng)
        await run.run(Load(num_requests=num_requests, num_in_flight=8, ways=WAYS), victims=())
    return run


async def num_injected(served: Served, rules: Iterable[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """By point and action."""
    pairs = sorted({(str(rule["point"]), str(rule["action"])) for rule in rules})
    return {pair: int(await served.counted("baton_injected_faults_total", point=pair[0], action=pair[1])) for pair in pairs}


async def check_no_client_notices(
    undisturbed: Served, serve_url: str, *, num_requests: int, probability: float
) -> dict[tuple[str, str], int]:
    """How often which fault was injected meanwhile."""
    rng = random.Random(5)
    questions = draw_questions(rng, 12)
    answers = await right_answers(undisturbed, questions)
    rules = chances(probability)
    faults = {"seed": 5, "rules": rules}
    changes = {"prefill": POOL, "decode": POOL, "gateway": {"max_attempts": MAX_ATTEMPTS}, "kv_transfer": TRANSFER}
    with serving(serve_url, "injected", fault_injection=faults, **changes) as served:
        await served.await_ready()
        report = FaultReport(await ask(served, questions, rng, num_requests), answers)
        injected = await num_injected(served, rules)
        print(report, injected)
        assert not report.complaints(), "\n".join([*report.complaints(), str(injected)])
        await served.await_balance()
    return injected


async def test_no_client_notices_what_is_late_lost_or_damaged(served: Served, serve_url: str) -> None:
    injected = await check_no_client_notices(served, serve_url, num_requests=80, probability=0.02)
    assert sum(number for (point, _), number in injected.items() if point != "lease.renew") > 30, injected


@pytest.mark.slow
async def test_no_client_of_many_notices_what_is_late_lost_or_damaged(served: Served, serve_url: str) -> None:
    injected = await check_no_client_notices(served, serve_url, num_requests=2000, probability=0.01)
    assert all(injected.values()), injected


@pytest.mark.slow
async def test_kills_of_workers_at_points_of_the_handoff(served: Served, serve_url: str) -> None:
    """At most ten, of which no client should notice one."""
    rng = random.Random(6)
    questions = draw_questions(rng, 12)
    answers = await right_answers(served, questions)
    rules = [{"point": point, "action": "kill", "after": after, "probability": 0.05} for point, after in _SAFE_PASSAGES.items()]
    pool = {**POOL, "replicas": 2}
    with serving(serve_url, "doomed", fault_injection={"rules": rules}, prefill=pool, decode=pool, kv_transfer=TRANSFER) as doomed:
        await doomed.await_ready()
        lives = pids(doomed)
        watch = asyncio.create_task(note_lives(doomed, lives))
        run = await ask(doomed, questions, rng, 2000)
        await doomed.await_ready()
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        num_kills = len(lives) - 4
        report = FaultReport(run, answers)
        print(f"{num_kills} kills", report)
        assert 2 <= num_kills <= 10
        assert report.share_right >= 0.98, str(report)
        wrong = [asking for asking in run.askings if not is_right_or_honest(asking, answers)]
        assert not wrong, "\n".join(map(str, wrong))
        await doomed.await_balance()


async def note_lives(served: Served, lives: set[int]) -> None:
    """Adds the processes of all lives of the workers, until cancelled."""
    while True:
        lives |= pids(served)
        await asyncio.sleep(0.5)


def pids(served: Served) -> set[int]:
    """Of all workers."""
    return {pid for deployment in ("Prefill", "Decode") for pid in served.pids(deployment)}


def is_right_or_honest(asking: Asking, answers: dict[Question, Answer]) -> bool:
    right = {question.prompt: answer for question, answer in answers.items()}[asking.question.prompt]
    return asking.answer == right if asking.failure is None else asking.failure.kind in HONEST
