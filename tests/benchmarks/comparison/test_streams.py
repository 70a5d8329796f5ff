"""Interference: which gaps count as with and which as without, and a server whose tokens wait while a long prompt is computed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.comparison.streams import NUM_STREAMS, Interference, measure_interference, window_itls
from benchmarks.load.answer import Answer, LoadError

_STALL_S = 0.2


def test_a_gap_counts_where_both_tokens_came_within() -> None:
    answer = Answer(0.0)
    for at_s in (1.0, 1.5, 2.0, 3.0, 3.25, 9.0):
        answer.add_chunk(at_s, 3)
    assert window_itls([answer], 1.0, 3.0) == [0.5, 0.5]
    assert window_itls([answer], 3.0, 9.0) == [0.25]
    assert window_itls([answer, answer], 3.0, 10.0) == [0.25, 5.75] * 2


class _Server:
    """Streams a token every few milliseconds, but none while a prompt of over 100 tokens is computed."""

    def __init__(self, status: int = 200) -> None:
        self.num_long = 0
        self._status = status
        self._free = asyncio.Event()
        self._free.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._status != 200:
            return web.json_response({"error": {"message": "full"}}, status=self._status)
        if len(body["prompt"]) > 100:
            self.num_long += 1
            self._free.clear()
            await asyncio.sleep(_STALL_S)
            self._free.set()
            await asyncio.sleep(0.05)  # streams go on before the next prompt
        response = web.StreamResponse()
        await response.prepare(request)
        async for event in self._events(body["max_tokens"]):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    async def _events(self, max_tokens: int) -> AsyncIterator[object]:
        for _ in range(max_tokens):
            await self._free.wait()
            yield {"choices": [{"text": "ab"}]}
            await asyncio.sleep(0.005)
        yield {"choices": [{"text": "", "finish_reason": "length"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": max_tokens}}


async def _measure(server: _Server) -> Interference:
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_get("/v1/models", lambda _: _models())
    async with TestServer(app) as running:
        return await measure_interference(str(running.make_url("/")), 1.0, 0)


async def _models() -> web.Response:
    return web.json_response({"data": [{"id": "tiny"}]})


async def test_what_the_readers_see_of_long_prompts() -> None:
    server = _Server()
    found = await _measure(server)
    assert server.num_long == found.num_prompts >= 1
    assert found.busy_p99_s >= _STALL_S
    assert found.busy_s >= 1.0
    assert found.quiet_p50_s > 0
    assert NUM_STREAMS == 8


async def test_a_server_that_refuses_is_no_figure() -> None:
    with pytest.raises(LoadError, match="full"):
        await _measure(_Server(status=429))
