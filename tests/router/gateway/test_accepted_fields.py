"""Good input against what it becomes: sampling parameters, prompts and messages."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.types import SamplingParams
from router.gateway.model_card import ModelCard
from router.gateway.schema import ChatCompletionRequest, CompletionRequest
from router.gateway.validation import chat_messages, completion_prompt, parse_request, sampling_params
from tests.router.gateway.parsing import CARD, as_chat, as_completion, chat, completion

HARMLESS: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "none", "functions": None, "response_format": {"type": "text"}, "n": 1, "echo": False, "audio": None},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s"},
    {"stream_options": {"include_usage": True, "include_obfuscation": False}, "parallel_tool_calls": True, "nobody_knows_this": 1},
    {"spaces_between_special_tokens": True, "top_a": 0, "request_id": "r", "return_tokens_as_token_ids": False, "vllm_xargs": None},
    {name: None for name in ChatCompletionRequest.model_fields if name not in ("model", "messages")},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_fields_that_ask_for_nothing_are_ignored(fields: dict[str, Any]) -> None:
    params = chat(as_chat(seed=1, **{name: value for name, value in fields.items() if name != "seed"}))
    assert params == SamplingParams(max_tokens=90, seed=1)


LOAD_GENERATORS: dict[str, dict[str, Any]] = {
    "guidellm": {"stop": None, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "vllm bench serve": {"repetition_penalty": 1.0, "logprobs": None, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("fields", LOAD_GENERATORS.values(), ids=LOAD_GENERATORS)
def test_what_load_generators_send_is_taken_as_they_mean_it(fields: dict[str, Any]) -> None:
    params = completion(as_completion(max_tokens=64, ignore_eos=True, stream=True, **fields))
    assert (params.max_tokens, params.ignore_eos, params.num_logprobs) == (64, True, None)
    assert params.repetition_penalty == params.temperature == 1.0


def test_values_arrive_as_sent() -> None:
    params = chat(
        as_chat(
            max_completion_tokens=5, min_tokens=2, seed=-1, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=1,
            frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"7": -100, "8": 2.5}, stop_token_ids=[3, 3, 4], ignore_eos=True,
            logprobs=True, top_logprobs=20,
        )
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=5, min_tokens=2, seed=2**64 - 1, temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias=((7, -100.0), (8, 2.5)), stop_token_ids=(3, 4), ignore_eos=True,
        num_logprobs=20,
    )  # fmt: skip


def test_logprobs() -> None:
    assert chat(as_chat(logprobs=True)).num_logprobs == 0
    assert chat(as_chat(logprobs=False)).num_logprobs is None
    assert completion(as_completion(logprobs=0)).num_logprobs == 0
    assert completion(as_completion(logprobs=5)).num_logprobs == 5
    assert completion(as_completion()).num_logprobs is None


def test_unseeded_requests_get_seeds_of_their_own() -> None:
    assert len({completion(as_completion()).seed for _ in range(20)}) == 20


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(10, 90), (99, 1), (1, 99)])
def test_prompt_and_output_may_fill_the_context(num_prompt_tokens: int, max_tokens: int) -> None:
    assert completion(as_completion(max_tokens=max_tokens), num_prompt_tokens).max_tokens == max_tokens


def test_without_max_tokens_the_output_fills_the_context_or_the_default() -> None:
    assert completion(as_completion(), 30).max_tokens == 70
    card = ModelCard("tiny", 0, 100, 352, "fp", default_max_tokens=16)
    request = parse_request(CompletionRequest, as_completion())
    assert sampling_params(request, 30, card).max_tokens == 16
    assert sampling_params(request, 95, card).max_tokens == 5


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    for prompt, expected in ((["hi"], "hi"), ([[1, 2]], [1, 2]), ([1, 2], [1, 2])):
        assert completion_prompt(parse_request(CompletionRequest, as_completion(prompt=prompt)), CARD) == expected


def test_messages_reach_the_template_as_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "Ada"},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "reasoning_content": "hm"},
    ]
    assert chat_messages(parse_request(ChatCompletionRequest, as_chat(messages=messages))) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "Ada"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
    ]
