"""Errors over HTTP: the table of statuses and headers, failures in mid-stream, deadlines, overload, clients that leave."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httpx2
import pytest

from cluster.config import GatewayConfig, RouterConfig
from cluster.errors import RequestError
from cluster.types import WorkerRole
from router.gateway.tokenizer import Tokenizer
from tests.eventually import eventually
from tests.router.gateway.fake_workers import ANSWER, Act
from tests.router.gateway.fakes import fake_cluster
from tests.router.gateway.serving import CHAT, COMPLETION, PATHS, chat_text, error_of, events_of, http_client, text_of


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "gpt-4"}, 404, "model_not_found"),
        ({"temperature": -1}, 400, "invalid_request"),
        ({"n": 2}, 400, "invalid_request"),
        ({"max_tokens": 256}, 400, "context_length_exceeded"),
    ],
)
async def test_bad_requests_reach_no_worker(tokenizer: Tokenizer, path: str, change: dict[str, Any], status: int, code: str) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        for stream in (False, True):
            response = await client.post(path, json={**PATHS[path], **change, "stream": stream})
            error = error_of(response, status)
            assert (error["code"], error["param"], error["type"]) == (code, next(iter(change)), RequestError.openai_type)
            assert response.headers["x-should-retry"] == "false"
        assert cluster.prefill.requests == []
        assert cluster.outcomes() == {code: 2}


async def test_an_over_long_prompt_names_the_prompt(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        body = {"model": "tiny", "prompt": "The capital of France. " * 200}
        assert error_of(await client.post("/v1/completions", json=body), 400)["param"] == "prompt"


@pytest.mark.parametrize(("body", "word"), [(b"{", "JSON"), (b'{"model": "\xff"}', "UTF-8"), (b"[]", "object"), (b"", "JSON")])
async def test_broken_bodies(tokenizer: Tokenizer, body: bytes, word: str) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        for path in PATHS:
            assert word in error_of(await client.post(path, content=body), 400)["message"]


async def test_large_bodies_are_refused_with_and_without_a_declared_length(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        large = b'{"model": "tiny", "prompt": "' + b"a" * (10 * 2**20) + b'"}'

        async def parts() -> Any:
            for start in range(0, len(large), 2**18):
                yield large[start : start + 2**18]

        assert error_of(await client.post("/v1/completions", content=large), 413)["code"] == "body_too_large"
        assert error_of(await client.post("/v1/completions", content=parts()), 413)["code"] == "body_too_large"
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_unknown_paths_and_methods_answer_in_the_same_shape(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        error_of(await client.get("/v1/nothing"), 404)
        response = await client.get("/v1/chat/completions")
        error_of(response, 405)
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9"])
async def test_bad_timeouts_are_refused(tokenizer: Tokenizer, value: str) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        response = await client.post("/v1/completions", json=COMPLETION, headers={"x-request-timeout-s": value})
        assert error_of(response, 400)["param"] == "x-request-timeout-s"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_of_the_header_before_the_first_byte(tokenizer: Tokenizer, stream: bool) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.prefill.acts.append(Act.STALL)
        body = {**CHAT, "stream": stream}
        response = await client.post("/v1/chat/completions", json=body, headers={"x-request-timeout-s": "0.2"})
        assert error_of(response, 408)["code"] == "deadline_exceeded"
        assert response.headers["x-should-retry"] == "false"


async def test_the_configured_deadline_holds_without_a_header(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, gateway=GatewayConfig(request_timeout_s=0.2)) as cluster, http_client(cluster) as client:
        cluster.decode.acts.append(Act.SOME_STALL)
        error_of(await client.post("/v1/chat/completions", json=CHAT), 408)


@pytest.mark.parametrize("act", [Act.SOME_FAIL, Act.TAKEN_FAIL, Act.SOME_END, Act.ABORT])
async def test_a_failure_after_the_first_byte_is_an_event_without_fake_finish(tokenizer: Tokenizer, act: Act) -> None:
    gateway = GatewayConfig(failure_policy="fail")
    async with fake_cluster(tokenizer, gateway=gateway) as cluster, http_client(cluster) as client:
        cluster.decode.acts.append(act)
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.status_code == 200
        events = events_of(response.text)
        assert set(events[-1]) == {"error"}
        assert "[DONE]" not in events
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
        assert text_of(ANSWER).startswith(chat_text(events[:-1]))
        cluster.decode.acts.extend([act] * 2)
        whole = await client.post("/v1/chat/completions", json=CHAT)
        assert whole.status_code in (500, 503), "not streamed, it is a status"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("index", "act"), [(0, Act.FIRST_FAIL), (1, Act.TICKET_STALE), (1, Act.TAKEN_FAIL), (1, Act.SOME_FAIL)])
async def test_a_workers_failure_is_not_seen(tokenizer: Tokenizer, index: int, act: Act, stream: bool) -> None:
    body = {**CHAT, "stream": stream, "stream_options": {"include_usage": True}} if stream else CHAT
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        expected, again = [await client.post("/v1/chat/completions", json=body) for _ in range(2)]
        assert _told(expected, stream) == _told(again, stream)
        cluster.workers[index].acts.append(act)
        assert _told(await client.post("/v1/chat/completions", json=body), stream) == _told(expected, stream)
        assert cluster.outcomes() == {"length": 3}


def _told(response: httpx2.Response, stream: bool) -> tuple[Any, ...]:
    """Text, finish reason and usage."""
    if not stream:
        answer = response.json()
        return answer["choices"], answer["usage"]
    *events, done = events_of(response.text)
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    return chat_text(events), reasons, events[-1]["usage"], done


async def test_no_capacity_may_be_tried_again(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, silent=(WorkerRole.DECODE,)) as cluster, http_client(cluster) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        error_of(response, 503)
        assert response.headers["x-should-retry"] == "true"
        assert int(response.headers["retry-after"]) >= 1


async def test_overload_answers_429_and_disturbs_nobody(tokenizer: Tokenizer) -> None:
    config = RouterConfig(recovery_s=0.0, capacity_wait_s=30.0, max_queued_requests=8)
    async with fake_cluster(tokenizer, router=config, silent=(WorkerRole.DECODE,)) as cluster, http_client(cluster) as client:
        calls = [asyncio.create_task(client.post("/v1/completions", json=COMPLETION)) for _ in range(20)]
        await eventually(lambda: sum(call.done() for call in calls) == 12)
        cluster.decode.is_up = True
        responses = await asyncio.gather(*calls)
        refused = [response for response in responses if response.status_code == 429]
        assert len(refused) == 12
        assert all(error_of(response, 429)["code"] == "overloaded" for response in refused)
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert [response.status_code for response in responses if response not in refused] == [200] * 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("index", "act"), [(0, Act.STALL), (1, Act.STALL), (1, Act.SOME_STALL)])
async def test_a_client_that_leaves_frees_everything(tokenizer: Tokenizer, stream: bool, index: int, act: Act) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.workers[index].acts.append(act)
        call = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
        await cluster.workers[index].stalled.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: cluster.outcomes() == {"client_gone": 1})
        await cluster.assert_idle()


async def test_a_client_that_leaves_in_the_queue_leaves_it(tokenizer: Tokenizer) -> None:
    config = RouterConfig(recovery_s=0.0, capacity_wait_s=30.0)
    async with fake_cluster(tokenizer, router=config, silent=(WorkerRole.DECODE,)) as cluster, http_client(cluster) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await eventually(lambda: len(cluster.router.queue) == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(lambda: len(cluster.router.queue) == 0)


async def test_many_requests_with_every_kind_of_end_leave_nothing(tokenizer: Tokenizer) -> None:
    roles = (WorkerRole.PREFILL, WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)
    async with fake_cluster(tokenizer, roles) as cluster, http_client(cluster) as client:
        prefill = deque([Act.SERVE, Act.FAIL, Act.OFFER_FAIL, Act.REFUSE, Act.STALE_EPOCH, Act.BUG] * 3)
        decode = deque([Act.DECLINE, Act.SERVE, Act.SOME_FAIL, Act.TAKEN_FAIL, Act.TICKET_STALE, Act.FAIL] * 3)
        for worker in cluster.workers:
            worker.acts = prefill if worker.role is WorkerRole.PREFILL else decode
        bodies = [{**CHAT, "stream": index % 2 == 0, "temperature": -1 if index % 7 == 0 else 1} for index in range(40)]
        responses = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
        assert {response.status_code for response in responses} <= {200, 400, 500, 503}
        assert sum(cluster.outcomes().values()) == 40
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
