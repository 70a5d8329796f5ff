"""The application of a fake cluster behind a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
import uvicorn

from router.gateway.app import create_app
from tests.router.gateway.fakes import FakeCluster
from tests.router.gateway.tokenizers_in_code import byte_level


@asynccontextmanager
async def http_client(cluster: FakeCluster) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the application, over sockets: streams and disconnects are real."""
    config = uvicorn.Config(create_app(cluster.gateway), host="127.0.0.1", port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        await task


def events_of(body: str) -> list[Any]:
    """The data of each event of a stream, parsed; `[DONE]` stays text."""
    data = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


CHAT: Final[dict[str, Any]] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
COMPLETION: Final[dict[str, Any]] = {"model": "tiny", "prompt": "The capital", "max_tokens": 8}
PATHS: Final = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def text_of(ids: tuple[int, ...]) -> str:
    """The text of these tokens."""
    return byte_level().decode(list(ids))


def chat_text(events: list[Any]) -> str:
    """The content of a chat's stream."""
    return "".join(choice["delta"].get("content", "") for event in events if event != "[DONE]" for choice in event["choices"])


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error, after checking that it has the OpenAI shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error
