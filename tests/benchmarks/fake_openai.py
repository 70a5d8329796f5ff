"""A small OpenAI server with scripted answers, which stamps when it got each request and wrote each chunk (`time.perf_counter()`)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass(frozen=True)
class Script:
    """One answer: `chunks` are (delay before it, text); then `ending`. `usage` is completion tokens; None sends no usage."""

    chunks: Sequence[tuple[float, str]] = ((0.0, "ab"), (0.0, "cd"))
    usage: int | None = 4
    ending: str = "finish"  # finish | error | drop | silence | garbage
    status: int = 200


@dataclass
class Stamps:
    """What the server saw of one request."""

    body: dict[str, Any]
    received_s: float
    written_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.written_s[0] - self.received_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.written_s, self.written_s[1:], strict=False)]


class FakeOpenAI:
    """Answers with `scripts` in turn, the last one for ever."""

    def __init__(self, *scripts: Script) -> None:
        self.seen: list[Stamps] = []
        self.headers: list[dict[str, str]] = []
        self._scripts = scripts or (Script(),)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        stamps = Stamps({}, time.perf_counter())
        script = self._scripts[min(len(self.seen), len(self._scripts) - 1)]
        self.seen.append(stamps)
        self.headers.append(dict(request.headers))
        stamps.body = await request.json()
        if script.status != 200:
            return web.json_response({"error": {"message": "the queue is full"}}, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("/chat/completions")
        for delay_s, text in script.chunks:
            await asyncio.sleep(delay_s)
            stamps.written_s.append(time.perf_counter())
            await _write(response, _chunk(text, chat, None))
        await self._end(request, response, script, chat)
        return response

    async def _end(self, request: web.Request, response: web.StreamResponse, script: Script, chat: bool) -> None:
        if script.ending == "error":
            await _write(response, {"error": {"message": "worker lost"}})
        elif script.ending == "drop":
            assert request.transport
            request.transport.abort()
        elif script.ending == "garbage":
            await response.write(b"data: {nonsense\n\n")
        elif script.ending == "finish":
            await _write(response, _chunk("", chat, "length"))
            if script.usage is not None:
                await _write(response, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": script.usage}})
            await response.write(b"data: [DONE]\n\n")

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})


@asynccontextmanager
async def served(fake: FakeOpenAI) -> AsyncIterator[str]:
    """Its root URL."""
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    app.router.add_post("/v1/chat/completions", fake.answer)
    app.router.add_get("/v1/models", fake.models)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


def _chunk(text: str, chat: bool, finish_reason: str | None) -> dict[str, Any]:
    said = {"delta": {"content": text}} if chat else {"text": text}
    return {"choices": [{"index": 0, **said, "finish_reason": finish_reason}]}


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
