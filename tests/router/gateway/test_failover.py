"""The application around Serve's proxy, over one that falls silent as the proxy's own does when a replica dies."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from router.gateway import failover
from router.gateway.failover import GatewayFailover

pytestmark = pytest.mark.asyncio

Attempt = Callable[[Scope, bytes, Send], Awaitable[None]]
PATH = "/v1/completions"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_PAUSE_S", 0.0)


class Proxy:
    """Serve's proxy: reads the body, then does what the next of `attempts` says."""

    def __init__(self, *attempts: Attempt) -> None:
        self._attempts = iter(attempts)
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = "/changed"  # as Serve's does, for its routes
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        await next(self._attempts)(scope, body, send)


async def dies(_scope: Scope, _body: bytes, _send: Send) -> None:
    """No status, no body."""


async def answers(_scope: Scope, _body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{}"})


def breaks_off(content_type: bytes) -> Attempt:
    async def attempt(_scope: Scope, _body: bytes, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", content_type)]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})

    return attempt


class Client:
    """Sends one request and keeps what comes back."""

    def __init__(self, *parts: bytes, method: str = "POST", path: str = PATH, headers: dict[bytes, bytes] | None = None) -> None:
        self._incoming: list[Message] = [
            {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)} for index, part in enumerate(parts)
        ]
        self._scope = {"type": "http", "method": method, "path": path, "headers": list((headers or {}).items())}
        self.messages: list[Message] = []

    async def ask(self, app: Any) -> None:
        async def send(message: Message) -> None:
            self.messages.append(message)

        await GatewayFailover(app)(self._scope, self._receive, send)

    async def _receive(self) -> Message:
        return self._incoming.pop(0) if self._incoming else {"type": "http.disconnect"}

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)


async def test_passes_a_good_answer_through() -> None:
    client, proxy = Client(b"{}"), Proxy(answers)
    await client.ask(proxy)
    assert (client.status, client.body, proxy.bodies) == (200, b"{}", [b"{}"])


async def test_asks_again_with_the_whole_body_when_nothing_was_sent() -> None:
    client, proxy = Client(b"abc", b"", b"def"), Proxy(dies, dies, answers)
    await client.ask(proxy)
    assert proxy.bodies == [b"abcdef"] * 3
    assert (client.status, client.is_complete) == (200, True)


async def test_gives_up_with_an_error_of_the_table() -> None:
    client = Client(b"{}")
    await client.ask(Proxy(*[dies] * 4))
    assert client.status == 503
    assert json.loads(client.body)["error"]["code"] == "no_capacity"
    assert (b"retry-after", b"1") in client.messages[0]["headers"]


async def test_ends_a_broken_stream_with_an_error_event() -> None:
    client = Client(b"{}")
    await client.ask(Proxy(breaks_off(b"text/event-stream; charset=utf-8")))
    first, last, rest = client.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "no_capacity"
    assert client.is_complete
    assert b"[DONE]" not in client.body


async def test_leaves_any_other_broken_body_without_its_end() -> None:
    client = Client(b"{}")
    await client.ask(Proxy(breaks_off(b"application/json")))
    assert not client.is_complete


async def test_does_not_ask_again_for_a_client_that_left() -> None:
    async def client_leaves(_scope: Scope, _body: bytes, _send: Send) -> None:
        pass

    class Listening(Proxy):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)
            await receive()  # the disconnect

    client, proxy = Client(b"{}"), Listening(client_leaves, answers)
    await client.ask(proxy)
    assert (len(proxy.bodies), client.messages) == (1, [])


async def test_does_not_keep_a_body_beyond_any_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_MAX_KEPT_BYTES", 5)
    client, proxy = Client(b"abc", b"def", b"ghi"), Proxy(dies, answers)
    await client.ask(proxy)
    assert proxy.bodies == [b"abcdefghi"]
    assert client.status == 503


@pytest.mark.parametrize(("method", "path", "num_attempts"), [("GET", "/metrics", 2), ("POST", "/other", 1), ("POST", f"/app{PATH}", 2)])
async def test_repeats_only_what_is_harmless(method: str, path: str, num_attempts: int) -> None:
    client, proxy = Client(b"", method=method, path=path), Proxy(dies, answers)
    await client.ask(proxy)
    assert len(proxy.bodies) == num_attempts


async def test_counts_the_clients_deadline_from_its_first_attempt() -> None:
    client, proxy = Client(b"{}", headers={b"x-request-timeout-s": b"5", b"a": b"b"}), Proxy(dies, answers)
    await client.ask(proxy)
    first, second = (float(headers[b"x-request-timeout-s"]) for headers in proxy.headers)
    assert 0 < second < first <= 5
    assert proxy.headers[1][b"a"] == b"b"


async def test_a_deadline_that_is_no_number_reaches_the_gateway() -> None:
    client, proxy = Client(b"{}", headers={b"x-request-timeout-s": b"soon"}), Proxy(answers)
    await client.ask(proxy)
    assert proxy.headers[0][b"x-request-timeout-s"] == b"soon"


async def test_serve_takes_the_middlewares() -> None:
    """By the name that the environment of a start gives."""
    from ray.serve._private.http_util import configure_http_middlewares
    from ray.serve.config import HTTPOptions

    [found] = configure_http_middlewares(HTTPOptions(middlewares=[])).middlewares
    assert found.cls is GatewayFailover
