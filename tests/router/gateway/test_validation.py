"""Bad input against the exact error: class, field, and a message that names the limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BatonError, ContextTooLong, InvalidRequest, ModelNotFound
from router.gateway.refused_fields import REFUSED_FIELDS
from router.gateway.schema import ChatCompletionRequest, CompletionRequest
from router.gateway.validation import parse_request
from tests.router.gateway.parsing import MESSAGES, as_chat, as_completion, chat, completion

NAN, INFINITY = float("nan"), float("inf")
BAD_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": NAN}, "temperature", "finite"),
    ({"temperature": INFINITY}, "temperature", "finite"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_p": NAN}, "top_p", "finite"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"top_k": 10**300}, "top_k", "less than or equal to"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 5.0}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**18}, "max_tokens", "less than or equal to"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "at most max_tokens (5)"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"seed": -(2**63) - 1}, "seed", "greater than or equal to"),
    ({"seed": 1.0}, "seed", "valid integer"),
    ({"presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
    ({"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"352": 1}}, "logit_bias", "0..351"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"stop_token_ids": [352]}, "stop_token_ids", "0..351"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "0..351"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]", "valid integer"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
    ({"stop": 5}, "stop", "valid"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stream": "true"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "valid boolean"),
    ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
    ({"priority": 0.5}, "priority", "valid integer"),
    ({"priority": 2**31}, "priority", "less than or equal to"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD_SAMPLING, ids=[str(row[0])[:40] for row in BAD_SAMPLING])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bad_values_are_refused_naming_field_and_limit(endpoint: str, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(as_chat(**fields)) if endpoint == "chat" else completion(as_completion(**fields))
    assert caught.value.param == param
    assert message in caught.value.message


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=[str(row[0])[:60] for row in BAD_CHATS])
def test_bad_chats(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(as_chat(**fields))
    assert caught.value.param == param


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, 352]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**300]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=[str(row[0])[:60] for row in BAD_COMPLETIONS])
def test_bad_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(as_completion(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "tiny",}', "not valid JSON"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"model": "tiny", "top_k": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"x": ' + b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_request(ChatCompletionRequest, body)


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_no_bytes_make_anything_but_a_request_error(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(CompletionRequest, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3), max_leaves=4
)
FIELDS = st.sampled_from(sorted({*CompletionRequest.model_fields, *REFUSED_FIELDS}))


@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_no_values_make_anything_but_params_or_a_request_error(fields: dict[str, Any]) -> None:
    try:
        params = completion(as_completion(**fields))
    except BatonError as error:
        assert error.http_status in (400, 404)
        assert error.param is not None
    else:
        assert 1 <= params.max_tokens <= 90
        assert 0 <= params.seed < 2**64


REFUSED_VALUES: list[tuple[str, Any]] = [
    ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("functions", [{}]), ("response_format", {"type": "json_object"}),
    ("n", 2), ("n", 0), ("n", "1"), ("best_of", 3), ("echo", True), ("suffix", "x"), ("audio", {"voice": "x"}), ("modalities", ["audio"]),
    ("prediction", {"type": "content"}), ("guided_json", {"type": "object"}), ("guided_regex", "a"), ("prompt_logprobs", 1),
    ("reasoning_effort", "high"), ("chat_template", "x"), ("use_beam_search", True), ("web_search_options", {"user_location": None}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), REFUSED_VALUES)
def test_fields_that_would_change_the_answer_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(as_chat(**{field: value}))
    assert caught.value.param == field
    assert "not supported" in caught.value.message


def test_the_only_value_that_is_supported_is_named() -> None:
    with pytest.raises(InvalidRequest, match="n: is not supported here other than 1"):
        chat(as_chat(n=2))


@pytest.mark.parametrize(
    ("field", "meant"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("stop_token_id", "stop_token_ids"), ("stream_option", "stream_options")],
)
def test_a_slip_of_the_pen_is_refused_and_says_what_was_meant(field: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {meant}") as caught:
        completion(as_completion(**{field: 1}))
    assert caught.value.param == field


def test_the_spelling_of_few_fields_is_looked_at() -> None:
    unknown = {f"x{number}": 1 for number in range(64)}
    assert completion(as_completion(**unknown, max_token=1, max_tokens=7)).max_tokens == 7
    with pytest.raises(InvalidRequest, match="n: is not supported"):
        completion(as_completion(**unknown, n=2))


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(10, 91), (99, 2), (100, 1), (101, 1), (100, None)])
def test_beyond_the_context_is_refused_with_the_numbers(num_prompt_tokens: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextTooLong, match="100") as caught:
        completion(as_completion(max_tokens=max_tokens), num_prompt_tokens)
    assert caught.value.param in ("max_tokens", "prompt")


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        completion(as_completion(model="gpt-4"))
    assert caught.value.param == "model"
