"""Bodies of requests for the tiny model, and what the gateway makes of them."""

from __future__ import annotations

import json
from typing import Any

from cluster.types import SamplingParams
from router.gateway.model_card import ModelCard
from router.gateway.schema import ChatCompletionRequest, CompletionRequest
from router.gateway.validation import chat_messages, check_model, completion_prompt, parse_request, sampling_params

CARD = ModelCard("tiny", 0, 100, 352, "fp")
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(body: bytes, num_prompt_tokens: int = 10) -> SamplingParams:
    """What a completion's body comes to, for a prompt of so many tokens."""
    request = parse_request(CompletionRequest, body)
    check_model(request, CARD)
    completion_prompt(request, CARD)
    return sampling_params(request, num_prompt_tokens, CARD)


def chat(body: bytes, num_prompt_tokens: int = 10) -> SamplingParams:
    """What a chat's body comes to, for a prompt of so many tokens."""
    request = parse_request(ChatCompletionRequest, body)
    check_model(request, CARD)
    chat_messages(request)
    return sampling_params(request, num_prompt_tokens, CARD)


def as_completion(**fields: Any) -> bytes:
    """A small body with `fields` besides."""
    return json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()


def as_chat(**fields: Any) -> bytes:
    """A small body with `fields` besides."""
    return json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
