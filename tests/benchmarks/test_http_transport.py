"""The load against a server that stamps what it does: latencies are the server's own, and every failure has its kind."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load.answer import LoadError
from benchmarks.load.driver import Budget, ClosedLoop, Driver, LoadResult
from benchmarks.load.http import HttpTarget, HttpTransport
from benchmarks.load.lengths import Fixed
from benchmarks.load.requests import LoadRequest, RandomTokens, RecordedRequests
from benchmarks.load.statistics import first_errors, summarize
from tests.benchmarks.fake_openai import FakeOpenAI, Script, served
from tests.conftest import free_port

TOKENS = RandomTokens(Fixed(5), Fixed(4), 1000)
TOLERANCE_S = 0.005  # of a median: a busy machine delays single events


async def load(
    fake: FakeOpenAI, num_requests: int = 1, concurrency: int = 1, requests: Iterator[LoadRequest] | None = None, **target: Any
) -> LoadResult:
    async with served(fake) as url, HttpTransport(HttpTarget(url, **target)) as transport:
        return await Driver(transport, "tiny").run(requests or TOKENS.requests(0), ClosedLoop(concurrency), Budget(num_requests))


@pytest.mark.slow  # within milliseconds of what the server saw: not for a machine that does other things
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_measures_what_the_server_did(api: str) -> None:
    fake = FakeOpenAI(Script([(0.03, "a"), *[(0.01 + 0.005 * index, "b") for index in range(4)]], usage=5))
    requests = RecordedRequests((LoadRequest("why", 5),)).requests(0)
    result = await load(fake, 12, requests=requests, api=api)
    assert len(result.answered) == 12
    late_s = [trace.ttft_s - seen.ttft_s for trace, seen in zip(result.traces, fake.seen, strict=True)]
    assert min(late_s) >= 0
    assert statistics.median(late_s) < TOLERANCE_S
    for trace, seen in zip(result.traces, fake.seen, strict=True):
        assert trace.itls_s == trace.gaps_s
        assert len(trace.gaps_s) == len(seen.gaps_s) == 4
    pairs = [pair for trace, seen in zip(result.traces, fake.seen, strict=True) for pair in zip(trace.gaps_s, seen.gaps_s, strict=True)]
    assert statistics.median(abs(ours - theirs) for ours, theirs in pairs) < TOLERANCE_S
    assert abs(statistics.mean(ours - theirs for ours, theirs in pairs)) < TOLERANCE_S


async def test_tokens_are_counted_by_usage_and_dealt_over_chunks() -> None:
    result = await load(FakeOpenAI(Script([(0.0, "ab"), (0.02, "abcdef")], usage=4)))
    (trace,) = result.traces
    assert (trace.num_prompt_tokens, trace.num_output_tokens) == (5, 4)
    assert len(trace.gaps_s) == 1
    assert len(trace.itls_s) == 3
    assert sum(trace.itls_s) == pytest.approx(trace.gaps_s[0])


async def test_a_server_without_usage_is_counted_by_chunks() -> None:
    (trace,) = (await load(FakeOpenAI(Script(usage=None)))).traces
    assert trace.num_output_tokens == 2


async def test_events_may_be_cut_anywhere_and_end_without_a_newline() -> None:
    events = [{"choices": [{"text": "é"}]}, {"choices": [{"text": "b", "finish_reason": "stop"}]}]
    body = b": ping\r\n\r\n" + b"\r\n\r\n".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() for event in events)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(len(body)):
            await response.write(body[index : index + 1])
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, HttpTransport(HttpTarget(str(server.make_url("")))) as transport:
        result = await Driver(transport, "tiny").run(TOKENS.requests(0), ClosedLoop(1), Budget(1))
    assert [chunk.num_chars for chunk in result.answered[0].chunks] == [1, 1]


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (Script(status=429), "http_429", "the queue is full"),
        (Script(status=500), "http_500", "the queue is full"),
        (Script(ending="error"), "error_event", "worker lost"),
        (Script(ending="drop"), "dropped", "ClientPayloadError"),
        (Script(ending="silence"), "unfinished", "without a finish reason"),
        (Script(ending="garbage"), "malformed", "nonsense"),
        (Script([(5.0, "late")]), "timeout", "in time"),
    ],
)
async def test_errors_have_kinds(script: Script, kind: str, message: str) -> None:
    result = await load(FakeOpenAI(script, Script()), 3, timeout_s=0.5)
    summary = summarize(result)
    assert summary.errors == {kind: 1}
    assert message in first_errors(result)[kind]
    assert (summary.num_requests, summary.num_answered, summary.num_output_tokens) == (3, 2, 8)


async def test_nobody_listens() -> None:
    async with HttpTransport(HttpTarget(f"http://127.0.0.1:{free_port()}")) as transport:
        result = await Driver(transport, "tiny").run(TOKENS.requests(0), ClosedLoop(2), Budget(2))
        with pytest.raises(LoadError) as raised:
            await transport.find_model()
    assert summarize(result).errors == {"connect": 2}
    assert raised.value.kind == "connect"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"])
async def test_any_form_of_the_url(suffix: str) -> None:
    fake = FakeOpenAI()
    async with served(fake) as url, HttpTransport(HttpTarget(url + suffix)) as transport:
        assert await transport.find_model() == "tiny"
        assert (await Driver(transport, "tiny").run(TOKENS.requests(0), ClosedLoop(1), Budget(1))).answered


async def test_bodies() -> None:
    fake = FakeOpenAI()
    await load(fake, extra_body={"priority": 3}, api_key="sk-1")
    requests = RecordedRequests((LoadRequest("why", 7),)).requests(0)
    await load(fake, requests=requests, api="chat", ignore_eos=False)
    tokens, chat = (seen.body for seen in fake.seen)
    assert tokens["prompt"] == list(next(TOKENS.requests(0)).prompt)
    assert tokens["ignore_eos"] and tokens["stream"] and tokens["stream_options"] == {"include_usage": True} and tokens["priority"] == 3
    assert chat["messages"] == [{"role": "user", "content": "why"}]
    assert chat["max_tokens"] == 7
    assert "ignore_eos" not in chat
    assert fake.headers[0]["Authorization"] == "Bearer sk-1"
    assert "Authorization" not in fake.headers[1]
