"""The router's calls over a handle of Serve's, here one that answers when it is told to."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.errors import NoCapacity
from router.control.deployment import caller

pytestmark = pytest.mark.asyncio

CLIENTS_REQUEST: ContextVar[str] = ContextVar("CLIENTS_REQUEST", default="none")


class Handle:
    """Of a deployment whose `call` gives what `answer` gets."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.asked_for = ""
        self.call = self

    def options(self, **_options: Any) -> Handle:
        return self

    async def remote(self, _method: str, _payload: bytes) -> bytes:
        self.asked_for = CLIENTS_REQUEST.get()
        return await self.answer


async def test_a_call_that_is_abandoned_goes_on() -> None:
    handle = Handle()
    call = caller(handle)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(call("admit", b""))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.01)
    assert not handle.answer.done()


async def test_a_call_is_no_part_of_the_clients_request() -> None:
    CLIENTS_REQUEST.set("a client's")  # Serve cancels what a request called when that request is cancelled
    handle = Handle()
    handle.answer.set_result(b"answer")
    assert await caller(handle)("admit", b"") == b"answer"  # type: ignore[arg-type]
    assert handle.asked_for == "none"


async def test_a_router_that_is_gone_has_no_capacity() -> None:
    handle = Handle()
    handle.answer.set_exception(RayActorError())
    with pytest.raises(NoCapacity, match="RayActorError"):
        await caller(handle)("admit", b"")  # type: ignore[arg-type]


async def test_a_call_that_serve_itself_cancels_is_no_cancel_of_ours() -> None:
    """The gateway's heart would stop."""
    handle = Handle()
    handle.answer.cancel()
    with pytest.raises(NoCapacity, match="CancelledError"):
        await caller(handle)("heartbeat", b"")  # type: ignore[arg-type]
