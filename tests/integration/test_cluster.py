"""The whole path, with real processes and a real model: Ray, Serve, gateway, router, a prefill and a decode worker, an OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from tests.integration.served import Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

MODEL = "smollm2-135m-instruct"
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TALE: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper. " * 8}]
QUEUE = 64


@pytest.fixture(scope="module")
def application(serve_url: str) -> Iterator[Served]:
    """Two pools, one worker each, and a short queue."""
    with serving(serve_url, "baton", router={"max_queued_requests": QUEUE}) as served:
        yield served


@pytest_asyncio.fixture
async def served(application: Served) -> AsyncIterator[Served]:
    """The application, idle; and whatever a test did, its books balance at the end."""
    await application.await_ready()
    yield application
    await application.await_balance()


async def ask(served: Served, **options: Any) -> str:
    async with served.client() as client:
        answer = await client.chat.completions.create(
            **{"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 32, **options}
        )
    return str(answer.choices[0].message.content)


async def test_answers_whole(served: Served) -> None:
    async with served.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32)
    assert "Paris" in str(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streams_the_same_answer(served: Served) -> None:
    pieces: list[str] = []
    finish, usage = None, None
    async with served.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
    assert "Paris" in "".join(pieces)
    assert "".join(pieces) == await ask(served)
    assert finish == "stop"
    assert usage is not None
    assert len(pieces) > 3, "it came in pieces"


async def test_blocks_crossed_between_the_pools(served: Served) -> None:
    """A prompt that no cache holds: prefill computes it all, decode computes none of it."""
    before = await served.books()
    await ask(served, messages=[{"role": "user", "content": f"{random.random()} " * 40}], max_tokens=8, extra_body={"ignore_eos": True})
    after = await served.books()
    steps = {role: _steps(after, role) - _steps(before, role) for role in ("prefill", "decode")}
    assert steps["prefill"] >= 1
    assert 7 <= steps["decode"] <= 8, "the first token is prefill's; decode steps once for each other, and computes no prompt"


def _steps(books: dict[str, Any], role: str) -> int:
    return sum(int(worker["num_steps"]) for worker in books["pools"][role]["workers"])


async def test_a_repeated_prompt_is_cached(served: Served) -> None:
    async with served.client() as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=MODEL, messages=TALE, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    assert answer.usage.prompt_tokens // 2 < cached < answer.usage.prompt_tokens


async def test_cancels_at_random_moments(served: Served) -> None:
    rng = random.Random(0)

    async def cancelled() -> None:
        async with served.client() as client:
            stream = await client.chat.completions.create(model=MODEL, messages=TALE, max_tokens=400, stream=True, seed=rng.getrandbits(30))
            async for _ in stream:
                pass

    async def one(delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await cancelled()
        except TimeoutError:
            pass

    await asyncio.gather(*(one(rng.uniform(0.01, 2.0)) for _ in range(10)))
    await served.await_balance()
    assert "Paris" in await ask(served)


async def test_survives_a_prefill_worker_killed_under_load(served: Served) -> None:
    """Nobody had a first byte, so nobody hears of it: each is prefilled again, by another life of the worker, to the same text."""
    loads = [asyncio.create_task(_tale(served, index)) for index in range(12)]
    await asyncio.sleep(1.0)  # some are prefilled, some are being prefilled, some wait
    [victim] = served.pids("Prefill")
    os.kill(victim, signal.SIGKILL)
    texts = await asyncio.gather(*loads)
    await served.await_ready()
    assert served.pids("Prefill") != [victim]
    assert "Paris" in await ask(served)
    for index in (0, 5, 11):
        assert await _tale(served, index) == texts[index]


async def test_survives_the_only_decode_worker_killed_under_load(served: Served) -> None:
    """Answers that are not streamed had no byte sent: all come, those admitted while nobody had noticed too."""
    loads = [asyncio.create_task(_tale(served, index)) for index in range(6)]
    await asyncio.sleep(1.5)  # some decode, some are being prefilled
    [victim] = served.pids("Decode")
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(0.3)
    texts = await asyncio.gather(*loads, *(_tale(served, index) for index in range(6, 8)))
    await served.await_ready()
    assert served.pids("Decode") != [victim]
    assert await _tale(served, 7) == texts[7]
    await served.await_balance()


async def _tale(served: Served, index: int) -> str:
    return await ask(served, messages=[{"role": "user", "content": f"{index} " * 200}], max_tokens=40, seed=index, temperature=1)


async def test_a_full_queue_refuses(served: Served) -> None:
    """200 at once on a queue of 64: each gets an answer or a 429 that says when to come again."""
    limits = httpx2.Limits(max_connections=200)
    async with httpx2.AsyncClient(timeout=300, limits=limits) as client:
        # Prompts of their own: of one that is cached, 200 are answered as fast as they come.
        prompts = [[{"role": "user", "content": f"{index} " * 100}] for index in range(200)]
        bodies = [{"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0} for messages in prompts]
        responses = await asyncio.gather(*(client.post(f"{served.url}/v1/chat/completions", json=body) for body in bodies))
    counts = Counter(response.status_code for response in responses)
    assert set(counts) == {200, 429}, counts
    assert counts[200] >= QUEUE
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
    assert "Paris" in await ask(served)


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"temperature": -0.5}, 400, "temperature"),
    ({"temperature": float("nan")}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 2}, 400, "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    ({"max_tokens": 8192}, 400, ""),
    ({"messages": [{"role": "user", "content": "long " * 9000}]}, 400, ""),
    ({"model": "gpt-4"}, 404, "model"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD)
async def test_bad_requests(served: Served, change: dict[str, Any], status: int, param: str) -> None:
    body = {"model": MODEL, "messages": CAPITAL, "max_tokens": 4} | change
    response = await _post(served, json.dumps(body).encode())
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param:
        assert error["param"] == param
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("prompt", "param"), [([49152], "prompt"), ([-1], "prompt"), ([], "prompt"), ("", "prompt")])
async def test_bad_prompts(served: Served, prompt: Any, param: str) -> None:
    response = await _post(served, json.dumps({"model": MODEL, "prompt": prompt}).encode(), "/v1/completions")
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"\xff\xfe", 400), (b'{"a": "\xff"}', 400), (b"[]", 400), (b" " * 10_000_000, 413)]
)
async def test_bad_bodies(served: Served, body: bytes, status: int) -> None:
    response = await _post(served, body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


async def _post(served: Served, body: bytes, path: str = "/v1/chat/completions") -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(served.url + path, content=body, headers={"content-type": "application/json"})


async def test_one_scrape_has_every_process(served: Served) -> None:
    await ask(served)
    families = list(text_string_to_metric_families((await served.get("/metrics")).text))
    labels = {value for family in families for sample in family.samples for value in sample.labels.values()}
    for process in ("gateway", "router", "prefill", "decode"):
        assert any(process in label.lower() for label in labels), process
    blocks = next(family for family in families if family.name == "baton_kv_blocks")
    idle = {sample.labels["state"]: 0.0 for sample in blocks.samples}
    for sample in blocks.samples:
        idle[sample.labels["state"]] += sample.value
    assert idle["owned"] == idle["leased"] == 0


async def test_time_adds_up_over_http(served: Served) -> None:
    body = json.dumps({"model": MODEL, "messages": CAPITAL, "max_tokens": 8, "temperature": 0}).encode()
    async with httpx2.AsyncClient(timeout=60) as client:
        headers = {"content-type": "application/json", "x-baton-timings": "1"}
        response = await client.post(f"{served.url}/v1/chat/completions", content=body, headers=headers)
    timings = response.json()["timings"]
    assert timings["prefill_s"] > 0
    assert timings["transfer_s"] > 0
    assert -0.001 < timings["ttft_unexplained_s"] < 0.1, "on a busy machine the hops may take long; that they are told is the point"


async def test_grpc_gives_the_text_of_http_and_leaves_nothing(served: Served) -> None:
    """The same engines, two protocols. What a cancel on a message, a deadline and `Abort` leave, the fixture would see."""
    prompt = "Once upon a time, in a lighthouse,"
    async with served.client() as client:
        by_http = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24)
    assert by_http.usage is not None
    async with aio.insecure_channel(served.grpc_target) as channel:
        stub: Any = InferenceStub(channel)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert (await stub.GetModel(pb.GetModelRequest())).name == MODEL
        wanted = pb.GenerateRequest(model=MODEL, text=prompt, temperature=0.0, max_tokens=24)
        messages = [message async for message in stub.Generate(wanted, timeout=60)]
        assert "".join(message.text for message in messages) == by_http.choices[0].text
        assert messages[-1].usage.prompt_tokens == by_http.usage.prompt_tokens
        assert messages[-1].usage.completion_tokens == by_http.usage.completion_tokens
        assert len(messages) > 3, "it came in pieces"
        endless = pb.GenerateRequest(model=MODEL, text=prompt, max_tokens=4000, ignore_eos=True)
        left = stub.Generate(endless, timeout=60)
        assert (await left.read()).text
        left.cancel()
        await served.await_balance()
        assert await _status(stub.Generate(endless, timeout=1.0)) is StatusCode.DEADLINE_EXCEEDED
        aborted = stub.Generate(endless, timeout=60)
        request_id = (await aborted.read()).request_id
        assert (await stub.Abort(pb.AbortRequest(request_id=request_id))).aborted
        assert await _status(aborted) is StatusCode.CANCELLED


async def _status(call: Any) -> StatusCode:
    with pytest.raises(aio.AioRpcError) as raised:
        while await call.read() is not aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            pass
    return raised.value.code()


async def test_colocated_gives_the_same_text(serve_url: str) -> None:
    """Promise P1: with one scheme on both sides the KV that crossed gives what one engine gives."""
    int8 = {"decode": {"scheme": "int8"}}
    questions = ["What is the capital of France?", "Count from 1 to 10.", "Write a haiku about rain."]
    with serving(serve_url, "pair", **int8) as pair, serving(serve_url, "colocated", mode="colocated", **int8) as alone:
        await pair.await_ready()
        await alone.await_ready()
        for question in questions:
            for options in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
                asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 48, **options}
                assert await ask(pair, **asked) == await ask(alone, **asked), question
        await pair.await_balance()
        await alone.await_balance()
