"""The seam between the load and a server's protocol."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from benchmarks.load.answer import Answer
from benchmarks.load.requests import LoadRequest


class Transport(Protocol):
    """One server, by one protocol. Opened and closed as an async context; any number of requests at a time."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    async def find_model(self) -> str:
        """The name of the model to ask.

        Raises:
            LoadError: the server does not say.
        """

    async def send(self, request: LoadRequest, model: str, answer: Answer) -> None:
        """Sends `request` and writes what comes back to `answer`, until its end.

        Raises:
            LoadError: anything but a whole answer; `answer` keeps what had come.
        """
