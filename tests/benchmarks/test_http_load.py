"""The load generator against a small HTTP server that answers as Baton does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.http_load import Workload, percentile, run_load, served_model

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
WORKLOAD = Workload(num_requests=3, num_prompt_tokens=5, num_output_tokens=4, vocab_size=1000, seed=7)


class FakeBaton:
    """Streams `num_tokens` tokens, two to a chunk, and remembers the bodies it got."""

    def __init__(self, num_tokens: int = 4, error: str | None = None, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._num_tokens, self._error, self._status = num_tokens, error, status

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._status != 200:
            return web.json_response({"error": {"message": "the queue is full"}}, status=self._status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(len(body["prompt"])):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _events(self, num_prompt_tokens: int) -> list[dict[str, Any]]:
        if self._error:
            return [{"choices": [{"text": "a"}]}, {"error": {"message": self._error}}]
        chunks: list[dict[str, Any]] = [{"choices": [{"text": "ab"}]} for _ in range(self._num_tokens // 2)]
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": self._num_tokens}
        return [*chunks, {"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[FakeBaton], Awaitable[str]]]:
    servers: list[TestServer] = []

    async def start(baton: FakeBaton) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", baton.complete)
        app.router.add_get("/v1/models", lambda _: _models())
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


async def _models() -> web.Response:
    return web.json_response({"data": [{"id": "tiny"}]})


async def test_sends_the_workload_and_counts_by_usage(serve: Callable[[FakeBaton], Awaitable[str]]) -> None:
    baton = FakeBaton()
    answered: list[int] = []
    result = await run_load(await serve(baton), "tiny", WORKLOAD, answered.append)
    assert answered == [1, 2, 3]
    assert sorted(body["prompt"] for body in baton.bodies) == sorted(WORKLOAD.prompts())
    assert all(body["ignore_eos"] and body["max_tokens"] == 4 and body["stream"] for body in baton.bodies)
    assert [trace.num_output_tokens for trace in result.traces] == [4, 4, 4]
    assert [len(trace.chunks_s) for trace in result.traces] == [2, 2, 2]  # the chunk without text is no token
    assert result.output_tokens_per_s == pytest.approx(12 / result.duration_s)


async def test_learns_the_served_model(serve: Callable[[FakeBaton], Awaitable[str]]) -> None:
    assert await served_model(await serve(FakeBaton())) == "tiny"


@pytest.mark.parametrize(
    ("baton", "message"),
    [
        (FakeBaton(num_tokens=2), "the usage says"),
        (FakeBaton(error="worker lost"), "worker lost"),
        (FakeBaton(status=429), "the queue is full"),
    ],
)
async def test_a_run_with_a_wrong_answer_is_no_result(serve: Callable[[FakeBaton], Awaitable[str]], baton: FakeBaton, message: str) -> None:
    url = await serve(baton)
    with pytest.raises(ExceptionGroup) as raised:
        await run_load(url, "tiny", WORKLOAD)
    assert message in str(raised.value.exceptions[0])


def test_prompts_are_seeded_and_share_no_prefix() -> None:
    prompts = WORKLOAD.prompts()
    assert prompts == WORKLOAD.prompts()
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert all(256 <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts != Workload(3, 5, 4, 1000, seed=8).prompts()


def test_percentile_is_a_value_of_the_list() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0
