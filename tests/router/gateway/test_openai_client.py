"""The `openai` package as the client: what it sends is served, what we send it parses as its own strict types."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.types import WorkerRole
from router.gateway.tokenizer import Tokenizer
from tests.router.gateway.fake_workers import ANSWER, NUM_CACHED_TOKENS, Act
from tests.router.gateway.fakes import FakeCluster, fake_cluster
from tests.router.gateway.serving import CHAT, COMPLETION, events_of, http_client, text_of


@asynccontextmanager
async def openai_client(tokenizer: Tokenizer, **cluster_args: Any) -> AsyncIterator[tuple[FakeCluster, openai.AsyncOpenAI]]:
    async with fake_cluster(tokenizer, **cluster_args) as cluster, http_client(cluster) as http:
        client = openai.AsyncOpenAI(api_key="any", base_url=f"{http.base_url}/v1", max_retries=0)
        async with client:
            yield cluster, client


async def test_chat(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer) as (_, client):
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=8, user="u")
        assert answer.choices[0].message.content == text_of(ANSWER[:8])
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == NUM_CACHED_TOKENS


async def test_streamed_chat_with_usage(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer) as (_, client):
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            max_completion_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text_of(ANSWER[:8])
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8


async def test_completions(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer) as (_, client):
        answer = await client.completions.create(
            model="tiny", prompt="The", max_tokens=8, logprobs=2, extra_body={"top_k": 5, "min_p": 0.1}
        )
        assert answer.choices[0].text == text_of(ANSWER[:8])
        stream = await client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=8, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == text_of(ANSWER[:8])
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_errors_are_the_packages_own(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer) as (cluster, client):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=[], max_tokens=8)
        assert bad.value.param == "messages"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="tools"):
            await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            )
        cluster.decode.acts.append(Act.ABORT)
        stream = await client.completions.create(model="tiny", prompt="The", max_tokens=8, stream=True)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]


async def test_the_client_retries_only_what_may_be_retried(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer) as (cluster, client):
        patient = client.with_options(max_retries=1)
        cluster.prefill.acts.extend([Act.STALL, Act.SERVE])
        with pytest.raises(openai.APIStatusError) as deadline:
            await patient.completions.create(model="tiny", prompt="The", max_tokens=8, extra_headers={"x-request-timeout-s": "0.2"})
        assert deadline.value.status_code == 408
        assert cluster.outcomes() == {"deadline_exceeded": 1}, "the deadline was the client's own: trying again would only double the load"


async def test_no_capacity_is_retried_by_the_client(tokenizer: Tokenizer) -> None:
    async with openai_client(tokenizer, silent=(WorkerRole.DECODE,)) as (cluster, client):
        with pytest.raises(openai.InternalServerError):
            await client.with_options(max_retries=1).completions.create(model="tiny", prompt="The", max_tokens=8)
        assert cluster.outcomes() == {"no_capacity": 2}


@pytest.mark.parametrize("logprobs", [False, True])
async def test_bodies_parse_as_the_packages_types_with_nothing_lost(tokenizer: Tokenizer, logprobs: bool) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as http:
        chat = {**CHAT, "logprobs": logprobs, "top_logprobs": 2 if logprobs else None}
        completion = {**COMPLETION, "logprobs": 2 if logprobs else None}
        whole: list[tuple[str, dict[str, Any], type[openai.BaseModel]]] = [
            ("/v1/chat/completions", chat, ChatCompletion),
            ("/v1/completions", completion, Completion),
        ]
        for path, body, kind in whole:
            answer = (await http.post(path, json=body)).json()
            assert kind.model_validate(answer, strict=True).model_dump(mode="json", exclude_unset=True) == answer
        stream = await http.post("/v1/chat/completions", json={**chat, "stream": True, "stream_options": {"include_usage": True}})
        for event in events_of(stream.text)[:-1]:
            assert ChatCompletionChunk.model_validate(event, strict=True).model_dump(mode="json", exclude_unset=True) == event
