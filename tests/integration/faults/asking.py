"""One request of a fault run: how far it got, and how it ended."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field

from tests.integration.faults.clients import TIMEOUT_S, Clients, Failure, Way
from tests.integration.faults.questions import Question


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be the same each time."""

    text: str
    finish_reason: str
    usage: tuple[int, int]


@dataclass(slots=True)
class Asking:
    """Times are `time.monotonic()`."""

    question: Question
    way: Way
    started_s: float = field(default_factory=time.monotonic)
    first_byte_s: float | None = None
    num_pieces: int = 0
    ended_s: float | None = None
    answer: Answer | None = None
    failure: Failure | None = None

    async def run(self, clients: Clients, *, leave_after: int | None = None, timeout_s: float | None = None) -> None:
        """Reads the answer; leaves right when piece number `leave_after` has come. A failure is noted, not raised."""
        texts: list[str] = []
        try:
            async with asyncio.timeout(TIMEOUT_S), aclosing(clients.pieces(self.question, self.way, timeout_s=timeout_s)) as pieces:
                async for piece in pieces:
                    self.first_byte_s = self.first_byte_s or time.monotonic()
                    self.num_pieces += 1
                    texts.append(piece.text)
                    if piece.finish_reason is not None:
                        assert piece.usage is not None, "the last piece tells the usage"
                        self.answer = Answer("".join(texts), piece.finish_reason, piece.usage)
                    elif self.num_pieces == leave_after:
                        return
        except Failure as failure:
            self.failure = failure
        except TimeoutError:
            self.failure = Failure("hangs", "")
        finally:
            self.ended_s = time.monotonic()


async def answers_of(clients: Clients, questions: list[Question]) -> dict[Question, Answer]:
    """The answers of an undisturbed cluster, asked one after another in turn over each way.

    Raises:
        Failure: it has one missing.
    """
    ways = list(Way)
    found = {}
    for index, question in enumerate(questions):
        asking = Asking(question, ways[index % len(ways)])
        await asking.run(clients)
        if asking.answer is None:
            raise asking.failure or AssertionError("neither an answer nor a failure")
        found[question] = asking.answer
    return found
