"""Answers over gRPC are HTTP's: the same text, tokens, logprobs, usage and finish reason for the same request."""

from __future__ import annotations

import math
from typing import Any

import pytest
from grpc import aio

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from router.gateway.grpc_service import REQUEST_ID_KEY
from router.gateway.tokenizer import Tokenizer
from tests.router.gateway.fake_workers import ANSWER, EOS, NUM_CACHED_TOKENS, Act
from tests.router.gateway.fakes import COLOCATED, DISAGGREGATED, fake_cluster
from tests.router.gateway.grpc_serving import generate, grpc_stub, grpc_target, request, text_in, tokens_in
from tests.router.gateway.serving import COMPLETION, http_client, text_of
from tests.router.gateway.tokenizers_in_code import byte_level

WHOLE = text_of(ANSWER)
# Fields of both protocols' requests, by one name.
ALIKE: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 32},
    {"max_tokens": 32, "stop": [WHOLE[5:7], "never"]},
    {"max_tokens": 32, "stop": [WHOLE[:1]]},
    {"min_tokens": 6, "stop": [WHOLE[2], WHOLE[7]]},
    {"logprobs": 0},
    {"logprobs": 2, "stop": [WHOLE[5:7]]},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"temperature": 0.5, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": 2**64 - 1, "presence_penalty": -1.0, "frequency_penalty": 0.5,
     "repetition_penalty": 1.5, "stop_token_ids": [3, 4], "priority": -3, "cache_salt": "salt"},
]  # fmt: skip


@pytest.mark.parametrize("roles", [DISAGGREGATED, COLOCATED], ids=["two-pools", "one-pool"])
@pytest.mark.parametrize("fields", ALIKE, ids=str)
async def test_the_same_request_has_http_s_answer(tokenizer: Tokenizer, fields: dict[str, Any], roles: Any) -> None:
    async with fake_cluster(tokenizer, roles) as cluster, http_client(cluster) as client, grpc_stub(cluster) as stub:
        for worker in cluster.workers:
            worker.answer = (*ANSWER[:20], EOS, *ANSWER[20:])
        response = await client.post("/v1/completions", json={**COMPLETION, "seed": 1, **fields})
        body = response.json()
        choice = body["choices"][0]
        messages = await generate(stub, **{"seed": 1, **fields})
        assert text_in(messages) == choice["text"]
        assert [message.finish_reason for message in messages[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (len(messages) - 1)
        reasons = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
        assert messages[-1].finish_reason == reasons[choice["finish_reason"]]
        usage = messages[-1].usage
        assert usage.prompt_tokens == body["usage"]["prompt_tokens"]
        assert usage.completion_tokens == body["usage"]["completion_tokens"] == len(tokens_in(messages))
        assert usage.cached_tokens == body["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_CACHED_TOKENS
        by_http, by_grpc = cluster.workers[0].requests
        assert by_grpc.sampling == by_http.sampling, "the workers cannot tell the protocols apart"
        assert by_grpc.prompt_token_ids == by_http.prompt_token_ids
        assert by_grpc.cache_salt == by_http.cache_salt
        assert sum(cluster.outcomes().values()) == 2


async def test_text_and_token_ids(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        ids = byte_level().encode("The capital").ids
        answers = [await generate(stub), await generate(stub, token_ids=pb.TokenIds(ids=ids))]
        assert [text_in(messages) for messages in answers] == [text_of(ANSWER[:8])] * 2
        assert [token.token_id for token in tokens_in(answers[0])] == list(ANSWER[:8])
        assert [list(one.prompt_token_ids) for one in cluster.prefill.requests] == [ids, ids]


async def test_logit_bias_and_an_unseeded_request(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        await generate(stub, logit_bias={7: -100.0, 300: 1.5})
        await generate(stub)
        first, second = cluster.prefill.requests
        assert dict(first.sampling.logit_bias) == {7: -100.0, 300: 1.5}
        assert first.sampling.seed != second.sampling.seed


async def test_it_comes_in_pieces_and_the_first_does_not_wait_for_decode(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        cluster.decode.acts.append(Act.STALL)
        call = stub.Generate(request())
        first = await call.read()
        assert first.text == text_of(ANSWER[:1])
        assert first.request_id == dict(await call.initial_metadata())[REQUEST_ID_KEY]
        assert first.request_id == cluster.prefill.requests[0].request_id
        call.cancel()


async def test_messages_have_text_and_one_id(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        messages = await generate(stub, max_tokens=32)
        assert len(messages) > 8
        assert all(message.text for message in messages[:-1])
        assert [bool(message.request_id) for message in messages] == [True] + [False] * (len(messages) - 1)
        assert not any(message.HasField("usage") or message.timings for message in messages[:-1])


async def test_logprobs(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, http_client(cluster) as client, grpc_stub(cluster) as stub:
        by_http = (await client.post("/v1/completions", json={**COMPLETION, "logprobs": 2})).json()["choices"][0]["logprobs"]
        tokens = tokens_in(await generate(stub, logprobs=2))
        assert [token.text_offset for token in tokens] == by_http["text_offset"]
        assert [token.bytes.decode() for token in tokens] == by_http["tokens"]
        assert [max(token.logprob, -9999.0) for token in tokens] == by_http["token_logprobs"]
        assert [token.logprob for token in tokens] == [-0.5 if token_id % 2 else -math.inf for token_id in ANSWER[:8]]
        for token in tokens:
            assert [(top.token_id - token.token_id, top.logprob) for top in token.top_logprobs] == [(0, -0.5), (1, -1.5)]
            assert token.top_logprobs[0].bytes == token.bytes
        assert not any(token.HasField("logprob") or token.top_logprobs for token in tokens_in(await generate(stub)))


async def test_timings_on_request(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_stub(cluster) as stub:
        messages = await generate(stub, include_timings=True)
        timings = messages[-1].timings
        assert timings["prefill_s"] == 0.002
        assert timings["transfer_s"] == 0.003
        assert timings["ttft_s"] > 0
        assert not (await generate(stub))[-1].timings
        assert cluster.registry.get_sample_value("baton_stage_seconds_count", {"stage": "prefill"}) == 2
        assert cluster.registry.get_sample_value("baton_requests_total", {"endpoint": "generate", "outcome": "length"}) == 2


async def test_failures_before_the_first_token_are_not_heard_of(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer, (*DISAGGREGATED[:1], *DISAGGREGATED)) as cluster, grpc_stub(cluster) as stub:
        cluster.workers[0].acts = cluster.workers[1].acts
        cluster.workers[0].acts.append(Act.OFFER_FAIL)
        assert text_in(await generate(stub)) == text_of(ANSWER[:8])


async def test_get_model(tokenizer: Tokenizer) -> None:
    async with fake_cluster(tokenizer) as cluster, grpc_target(cluster) as target, aio.insecure_channel(target) as channel:
        stub: Any = InferenceStub(channel)
        model = await stub.GetModel(pb.GetModelRequest())
        assert (model.name, model.created, model.max_model_len, model.vocab_size) == ("tiny", 1_700_000_000, 256, 352)
        assert model.system_fingerprint == "baton-float32-kv_float32-reference"
        assert not model.HasField("default_max_tokens")
