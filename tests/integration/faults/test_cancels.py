"""Clients that leave at any moment, among others that stay: those get their right answers, and nothing is left of the rest."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from tests.integration.faults.asking import Asking, answers_of
from tests.integration.faults.clients import Clients, Way, connected
from tests.integration.faults.processes import await_files_closed, open_files
from tests.integration.faults.questions import Question, draw_questions
from tests.integration.served import Served

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

NUM_IN_FLIGHT = 12
STAYS = 0.2  # this share of the clients reads to the end

DEADLINES = {
    ("status", "408 deadline_exceeded"),
    ("event", "deadline_exceeded"),
    ("grpc", "DEADLINE_EXCEEDED"),
    ("status", "429 overloaded"),  # it would pass in the queue
    ("grpc", "RESOURCE_EXHAUSTED"),
}


@dataclass(frozen=True)
class Moments:
    """When clients leave: uniform over the time that answers take."""

    rng: random.Random
    life_s: float

    def draw_s(self, earliest_s: float = 0.0) -> float:
        return self.rng.uniform(earliest_s, max(self.life_s, 2 * earliest_s))


Leave = Callable[[Served, Clients, Asking, Moments], Awaitable[None]]


async def at_a_moment(_served: Served, clients: Clients, asking: Asking, moments: Moments) -> None:
    """Any: in the queue, in prefill, in the handoff, in decode, in the middle of a message."""
    with suppress(TimeoutError):
        async with asyncio.timeout(moments.draw_s()):
            await asking.run(clients)


async def on_a_message(_served: Served, clients: Clients, asking: Asking, moments: Moments) -> None:
    await asking.run(clients, leave_after=moments.rng.randint(1, 6))


async def with_the_connection(served: Served, _clients: Clients, asking: Asking, moments: Moments) -> None:
    """The client's whole channel or connection pool goes."""
    async with connected(served) as own:
        await at_a_moment(served, own, asking, moments)


async def at_a_deadline(_served: Served, clients: Clients, asking: Asking, moments: Moments) -> None:
    """Told to the server, which ends the request itself."""
    await asking.run(clients, timeout_s=moments.draw_s(0.05))


LEAVES: list[Leave] = [at_a_moment, at_a_moment, on_a_message, with_the_connection, at_a_deadline]


class CancelRun:
    """A closed loop of clients, most of which leave."""

    def __init__(self, served: Served, clients: Clients, questions: list[Question], moments: Moments) -> None:
        self._served = served
        self._clients = clients
        self._questions = questions
        self._moments = moments
        self._rng = moments.rng
        self.left: list[Asking] = []
        self.stayed: list[Asking] = []

    async def run(self, num_leaving: int) -> None:
        """Until so many have left, or were answered before they could."""
        await asyncio.gather(*(self._client(num_leaving) for _ in range(NUM_IN_FLIGHT)))

    async def _client(self, num_leaving: int) -> None:
        while len(self.left) < num_leaving:
            asking = Asking(self._rng.choice(self._questions), self._rng.choice(list(Way)))
            if self._rng.random() < STAYS:
                self.stayed.append(asking)
                await asking.run(self._clients)
            else:
                self.left.append(asking)
                await self._rng.choice(LEAVES)(self._served, self._clients, asking, self._moments)


async def life_s(clients: Clients, questions: list[Question]) -> float:
    """What an answer takes with so many others in flight: the median."""
    askings = [Asking(question, way) for question, way in zip(questions, itertools.cycle(Way), strict=False)]
    await asyncio.gather(*(asking.run(clients) for asking in askings))
    return statistics.median(asking.ended_s - asking.started_s for asking in askings if asking.ended_s is not None)


async def num_lost_ends(served: Served) -> float:
    """Placements that the router ended seconds late, since only a heartbeat told it."""
    return await served.counted("baton_router_placements_ended_total", reason="unlisted")


@pytest.mark.parametrize("num_leaving", [100, pytest.param(500, marks=pytest.mark.slow)])
async def test_clients_that_leave(served: Served, num_leaving: int) -> None:
    rng = random.Random(num_leaving)
    questions = draw_questions(rng, 12)
    async with connected(served) as clients:
        answers = await answers_of(clients, questions)
        moments = Moments(rng, await life_s(clients, [question.uncached(rng) for question in questions]))
        await CancelRun(served, clients, questions, moments).run(NUM_IN_FLIGHT)  # opens what stays open
    await served.await_balance()
    files, lost = open_files(served), await num_lost_ends(served)
    async with connected(served) as clients:
        run = CancelRun(served, clients, [question.uncached(rng) for question in questions], moments)
        await run.run(num_leaving)
    await served.await_balance()
    await await_files_closed(served, files)
    assert await num_lost_ends(served) == lost, "the router hears of each end at once, from the gateway"
    right = {question.prompt: answer for question, answer in answers.items()}
    for asking in run.stayed + run.left:
        if asking.answer is not None:
            assert asking.answer == right[asking.question.prompt]
    assert all(asking.answer is not None for asking in run.stayed), [asking.failure for asking in run.stayed if asking.failure]
    failed = {(asking.failure.kind, asking.failure.code) for asking in run.left if asking.failure is not None}
    assert failed <= DEADLINES
    ends = Counter(_end(asking) for asking in run.left)
    print(f"of {len(run.left)} that left: {dict(ends)}; {len(run.stayed)} stayed")
    assert ends["before a byte"] >= num_leaving // 10
    assert ends["after a byte"] >= num_leaving // 10


def _end(asking: Asking) -> str:
    if asking.answer is not None:
        return "answered"
    return "before a byte" if asking.first_byte_s is None else "after a byte"
