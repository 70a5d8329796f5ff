"""The parts of HTTP that a framework leaves to us: bodies with a limit, clients that leave, and event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import BodyTooLarge, ClientGone

T = TypeVar("T")

DONE: Final = "[DONE]"
TIMEOUT_HEADER: Final = "x-request-timeout-s"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """
    Raises:
        BodyTooLarge: as soon as that is known.
        ClientGone: the client left before the body's end.
    """
    too_large = BodyTooLarge(f"the body is over the limit of {limit_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit_bytes:
                raise too_large
    except BodyTooLarge:
        raise
    except Exception as error:  # ClientDisconnect, or what Serve's own receive raises for a client that left just then: an error of Ray's
        raise ClientGone("the client left while sending") from error
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("the client left")
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, the first of which is there already.

    The generator is closed on every way out, at once: until the garbage collector came, workers would go on for nobody.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):  # servers tell that the client left by either
            return

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_event(self._first))
            async for data in events:
                await send(_event(data))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
