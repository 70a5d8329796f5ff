"""Answers over HTTP: whole and streamed, with logprobs, stop strings, usage and timings."""

from __future__ import annotations

import pytest

from router.gateway.tokenizer import Tokenizer
from tests.router.gateway.fake_workers import ANSWER, EOS, NUM_CACHED_TOKENS, Act
from tests.router.gateway.fakes import fake_cluster
from tests.router.gateway.serving import CHAT, COMPLETION, PATHS, chat_text, events_of, http_client, text_of
from tests.router.gateway.tokenizers_in_code import byte_level


async def test_chat(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
        body = response.json()
        num_prompt_tokens = cluster.prefill.requests[0].num_prompt_tokens
        assert body["choices"] == [
            {"index": 0, "message": {"role": "assistant", "content": text_of(ANSWER[:8]), "refusal": None}, "logprobs": None,
             "finish_reason": "length"}
        ]  # fmt: skip
        assert body["usage"] == {
            "prompt_tokens": num_prompt_tokens, "completion_tokens": 8, "total_tokens": num_prompt_tokens + 8,
            "prompt_tokens_details": {"cached_tokens": NUM_CACHED_TOKENS},
        }  # fmt: skip
        assert body["id"].startswith("chatcmpl-")
        assert body["object"] == "chat.completion"
        assert body["system_fingerprint"] == "baton-float32-kv_float32-reference"
        assert "timings" not in body
        assert cluster.outcomes() == {"length": 1}


async def test_completion_of_text_and_of_ids(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        ids = byte_level().encode("The capital").ids
        bodies = [(await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt})).json() for prompt in ("The capital", ids)]
        assert [body["choices"][0]["text"] for body in bodies] == [text_of(ANSWER[:8])] * 2
        assert [list(request.prompt_token_ids) for request in cluster.prefill.requests] == [ids, ids]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("includes_usage", [False, True])
async def test_stream(tokenizer: Tokenizer, path: str, includes_usage: bool) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        options = {"stream": True, "stream_options": {"include_usage": includes_usage}}
        response = await client.post(path, json={**PATHS[path], **options})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert events[-1] == "[DONE]"
        chunks = events[:-2] if includes_usage else events[:-1]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        texts = [choice["text"] if path == "/v1/completions" else choice["delta"].get("content", "") for choice in choices]
        assert "".join(texts) == text_of(ANSWER[:8])
        assert all(texts[:-1]), "no empty chunks"
        if path == "/v1/chat/completions":
            assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert len({event["id"] for event in events[:-1]}) == 1
        if includes_usage:
            assert events[-2]["choices"] == []
            assert events[-2]["usage"]["completion_tokens"] == 8
            assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        else:
            assert all("usage" not in chunk for chunk in chunks)


async def test_the_first_event_does_not_wait_for_decode(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.decode.acts.append(Act.STALL)
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            first = await anext(response.aiter_text())
            assert chat_text(events_of(first)) == text_of(ANSWER[:1])


async def test_eos_has_no_text_and_counts(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.prefill.answer = cluster.decode.answer = (*ANSWER[:4], EOS)
        body = (await client.post("/v1/chat/completions", json={**CHAT, "skip_special_tokens": False})).json()
        assert body["choices"][0]["message"]["content"] == text_of(ANSWER[:4])
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_before_it(tokenizer: Tokenizer, stream: bool) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        whole = text_of(ANSWER)
        body = {**CHAT, "max_tokens": 32, "stop": [whole[5:7], "never"], "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
        if stream:
            events = events_of(response.text)
            assert chat_text(events) == whole[:5]
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
        else:
            assert response.json()["choices"][0]["message"]["content"] == whole[:5]
            assert response.json()["usage"]["completion_tokens"] == 7
        assert cluster.outcomes() == {"stop": 1}


async def test_a_stop_string_in_the_first_token_needs_no_decode_worker(tokenizer: Tokenizer, overlaps: bool) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        cluster.decode.acts.append(Act.STALL)  # with overlap it may be asked at the offer already: it need not answer
        body = {**CHAT, "stop": text_of(ANSWER[:1])}
        assert (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"] == ""
        assert len(cluster.decode.requests) <= int(overlaps)


async def test_stop_strings_count_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        body = {**CHAT, "min_tokens": 6, "stop": [text_of(ANSWER[2:3]), text_of(ANSWER[7:8])]}
        content = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        assert content == text_of(ANSWER[:7])


async def test_chat_logprobs_one_entry_a_token(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in whole] == [list(text_of((token_id,)).encode()) for token_id in ANSWER[:8]]
        assert [entry["logprob"] for entry in whole] == [-0.5 if token_id % 2 else -9999.0 for token_id in ANSWER[:8]]
        assert [len(entry["top_logprobs"]) for entry in whole] == [2] * 8
        events = events_of((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        assert [entry for event in events[:-1] for entry in event["choices"][0]["logprobs"]["content"]] == whole


async def test_completion_logprobs_say_where_each_token_begins(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        body = {**COMPLETION, "logprobs": 1}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        logprobs = choice["logprobs"]
        starts = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        assert all(choice["text"][start:].startswith(token) for start, token in starts)
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 8
        events = events_of((await client.post("/v1/completions", json={**body, "stream": True})).text)
        offsets = [offset for event in events[:-1] for offset in event["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == logprobs["text_offset"]


@pytest.mark.parametrize("stream", [False, True])
async def test_timings_on_request(tokenizer: Tokenizer, stream: bool) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client:
        body = {**CHAT, "stream": stream, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/chat/completions", json=body, headers={"x-baton-timings": "1"})
        timings = (events_of(response.text)[-2] if stream else response.json())["timings"]
        assert timings["prefill_s"] == 0.002
        assert timings["transfer_s"] == 0.003
        assert timings["ttft_s"] > 0
        stages = ("gateway", "queue", "prefill_wait", "prefill", "transfer", "decode_wait", "first_step")
        for stage in stages:
            assert cluster.registry.get_sample_value("baton_stage_seconds_count", {"stage": stage}) == 1
        assert cluster.registry.get_sample_value("baton_ttft_seconds_count") == 1
        assert cluster.registry.get_sample_value("baton_itl_seconds_count") == 7
        assert cluster.registry.get_sample_value("baton_output_tokens_total") == 8
