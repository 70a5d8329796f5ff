"""gRPC between workers of one process: the stubs and services are real, their messages wait on the wire for as long as the test likes.

A message that is on its way arrives even when its sender does not wait for it any more, as it does over TCP. One that is lost ends its
call for the caller, who does not learn whether it had been heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

if TYPE_CHECKING:
    from tests.handoff.local_server import LocalServer

Observer = Callable[[str, Any, Any], None]  # (path, request, answer), both as messages


def failure(code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> aio.AioRpcError:
    """What a caller gets; `metadata` is the trailing one."""
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), details, "")


def unavailable(details: str) -> aio.AioRpcError:
    return failure(grpc.StatusCode.UNAVAILABLE, details)


@dataclass(eq=False)
class Message:
    """On its way, until somebody lets it arrive or loses it."""

    label: str
    arrival: asyncio.Future[None]

    def deliver(self) -> None:
        if not self.arrival.done():
            self.arrival.set_result(None)

    def lose(self) -> None:
        if not self.arrival.done():
            self.arrival.set_exception(unavailable(f"{self.label} was lost"))


@dataclass
class LocalWire:
    """All servers by address. Messages whose label contains `held` wait in `messages`; None holds nothing."""

    servers: dict[str, LocalServer] = field(default_factory=dict)
    held: str | None = None
    messages: list[Message] = field(default_factory=list)
    on_sent: Observer = lambda *_: None  # a unary answer leaves its server
    on_heard: Observer = lambda *_: None  # and reaches its caller
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def travel(self, label: str) -> None:
        """Returns when the message has arrived; raises when it was lost."""
        if self.held is None or self.held not in label:
            return
        message = Message(label, asyncio.get_running_loop().create_future())
        self.messages.append(message)
        try:
            await message.arrival
        finally:
            self.messages.remove(message)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def deliver_all(self) -> None:
        """From now on everything arrives at once."""
        self.held = None
        for message in list(self.messages):
            message.deliver()
