"""A closed loop of requests, in the course of which processes are killed, or stopped for a while."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.integration.faults.asking import Asking
from tests.integration.faults.clients import Clients, Way
from tests.integration.faults.processes import Process, processes
from tests.integration.faults.questions import Question
from tests.integration.served import Served

_LONGEST_DELAY_S: Final = 1.0
_FOUND_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """`ways` are drawn from with equal chances: name one twice, and it is asked twice as often."""

    num_requests: int
    num_in_flight: int
    ways: Sequence[Way]


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """A kill -9 (`lasts_s` is 0) or a SIGSTOP until a SIGCONT, and who was in flight then, with or without a byte of an answer."""

    process: Process
    at_s: float
    lasts_s: float
    with_byte: list[Asking]
    without_byte: list[Asking]

    @property
    def until_s(self) -> float:
        return self.at_s + self.lasts_s


@dataclass
class FaultRun:
    """Faults come evenly over the requests, each a random moment after the request that it is due at, in random order.

    `stop_s`: processes are not killed but stopped for so long.
    """

    served: Served
    clients: Clients
    questions: list[Question]
    rng: random.Random
    stop_s: float = 0.0
    askings: list[Asking] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    async def run(self, load: Load, victims: Sequence[str]) -> None:
        """Returns when each request has ended, however it did."""
        order = self.rng.sample(victims, len(victims))
        due = {round(load.num_requests * (index + 1) / (len(order) + 1)): victim for index, victim in enumerate(order)}
        async with asyncio.TaskGroup() as group:
            for _ in range(load.num_in_flight):
                group.create_task(self._client(load, due, group))

    async def _client(self, load: Load, due: dict[int, str], group: asyncio.TaskGroup) -> None:
        while len(self.askings) < load.num_requests:
            asking = Asking(self.rng.choice(self.questions).uncached(self.rng), self.rng.choice(load.ways))
            self.askings.append(asking)
            victim = due.pop(len(self.askings), None)
            if victim is not None:
                group.create_task(self._strike(victim, self.rng.uniform(0, _LONGEST_DELAY_S)))
            await asking.run(self.clients)

    async def _strike(self, kind: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        victim = self.rng.choice(await self._living(kind))
        in_flight = [asking for asking in self.askings if asking.ended_s is None]
        os.kill(victim.pid, signal.SIGSTOP if self.stop_s else signal.SIGKILL)
        with_byte = [asking for asking in in_flight if asking.first_byte_s is not None]
        without_byte = [asking for asking in in_flight if asking.first_byte_s is None]
        self.faults.append(Fault(victim, time.monotonic(), self.stop_s, with_byte, without_byte))
        if self.stop_s:
            try:
                await asyncio.sleep(self.stop_s)
            finally:
                os.kill(victim.pid, signal.SIGCONT)

    async def _living(self, kind: str) -> list[Process]:
        """One that was killed before may not be back yet."""
        deadline_s = time.monotonic() + _FOUND_S
        while not (found := processes(self.served, kind)):
            assert time.monotonic() < deadline_s, f"no {kind} process came back"
            await asyncio.sleep(0.1)
        return found
