"""What a client sees when the gateway that serves it dies: nothing, or an error that says so (promise P8).

Runs in Serve's HTTP proxy, around the proxy's own application, which goes silent when a replica dies: it sends no status, or leaves a body
without its end. Here

    before the first byte   the request is sent again, from its kept body, to another gateway or to the next life of this one
    in a stream             an error event ends it
    in any other body       the connection breaks, as it would have

Only answers of models are asked for twice, and GETs: nothing else is known to be harmless. Serve calls `middlewares` where its
processes have `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=router.gateway.failover:middlewares` in their environment.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import NoCapacity
from router.gateway.error_body import error_event, error_response
from router.gateway.http_io import TIMEOUT_HEADER

_MAX_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.2  # Serve strikes a dead replica off its list in about this time; after that it waits for the next one
_MAX_KEPT_BYTES: Final = 16 * 2**20  # larger bodies are sent once: the proxy would hold them for as long as the answer takes
_ANSWER_PATHS: Final = ("/v1/chat/completions", "/v1/completions")
_TIMEOUT_HEADER: Final = TIMEOUT_HEADER.encode()
_LEAST_TIMEOUT_S: Final = 0.001  # the gateway answers 408


def middlewares() -> list[Middleware]:
    """What Serve's proxy puts around its application."""
    return [Middleware(GatewayFailover)]


class GatewayFailover:
    """An ASGI application around another that may fall silent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _may_repeat(scope):
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        body = _KeptBody(receive)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            response = _Response(send)
            await self._app(_aged(scope, time.monotonic() - started_s), body.replay(), response.send)
            if response.is_complete or body.client_has_left:
                return
            if response.has_started:
                await response.cut_off()
                return
            if not body.is_kept or attempt == _MAX_ATTEMPTS:
                break
            await asyncio.sleep(_PAUSE_S)
        failure = error_response(NoCapacity("the gateway that served the request has ended", retry_after_s=1.0))
        await failure(scope, body.replay(), send)


class _KeptBody:
    """A request's messages, kept so that they can be received again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._num_bytes = 0
        self.client_has_left = False

    @property
    def is_kept(self) -> bool:
        """Whether a replay would be whole."""
        return self._num_bytes <= _MAX_KEPT_BYTES

    def replay(self) -> Receive:
        """A `receive` that starts at the first message."""
        position = 0

        async def receive() -> Message:
            nonlocal position
            if position < len(self._messages):
                position += 1
                return self._messages[position - 1]
            message = await self._receive()
            self.client_has_left = self.client_has_left or message["type"] == "http.disconnect"
            self._num_bytes += len(message.get("body", b""))
            if self.is_kept:
                self._messages.append(message)
                position += 1
            else:
                self._messages.clear()
            return message

        return receive


class _Response:
    """How far one attempt's answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.is_complete = False
        self._is_event_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            content_types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_event_stream = any(value.startswith(b"text/event-stream") for value in content_types)
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True
        await self._send(message)

    async def cut_off(self) -> None:
        """Says that no more will come, where the form of the answer has room for that."""
        if self._is_event_stream:
            event = error_event(NoCapacity("the gateway that served the stream ended before it"))
            await self._send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": False})


def _may_repeat(scope: Scope) -> bool:
    method: str = scope["method"]
    path: str = scope["path"]
    return method == "GET" or (method == "POST" and path.endswith(_ANSWER_PATHS))


def _aged(scope: Scope, age_s: float) -> Scope:
    """A copy, which the proxy may change; a deadline that the client set is counted from its first attempt."""
    return {**scope, "headers": [(name, _less(value, age_s) if name == _TIMEOUT_HEADER else value) for name, value in scope["headers"]]}


def _less(seconds: bytes, age_s: float) -> bytes:
    try:
        return str(max(float(seconds) - age_s, _LEAST_TIMEOUT_S)).encode()
    except ValueError:
        return seconds  # the gateway says what is wrong with it
