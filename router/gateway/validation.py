"""From a client's bytes to a checked prompt and final `SamplingParams`: what passes here can be served, or is refused naming the field."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from cluster.errors import ContextTooLong, InvalidRequest, ModelNotFound
from cluster.types import SamplingParams
from router.gateway.model_card import ModelCard
from router.gateway.refused_fields import check_refused_fields
from router.gateway.schema import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationRequest, TextPart

R = TypeVar("R", bound=GenerationRequest)

_UINT64: Final = 2**64 - 1
_SHOWN_CHARS: Final = 60
_UNION_BRANCH: Final = re.compile(r"str|int|constrained-\w+|(list|function-\w+)\[.*\]")


def parse_request(kind: type[R], body: bytes) -> R:
    """
    Raises:
        InvalidRequest: not UTF-8, not JSON, a wrong type, a value out of its limits, or a field misspelt or to be ignored.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: invalid byte at position {error.start}") from error
    with _refusing():
        request = kind.model_validate_json(body)
    check_refused_fields(request.model_extra or {}, kind.model_fields)
    return request


def check_fields(kind: type[R], fields: Mapping[str, Any]) -> R:
    """As `parse_request`, for fields that did not come as JSON.

    Raises:
        InvalidRequest: a value out of its limits.
    """
    with _refusing():
        return kind.model_validate(fields)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> InvalidRequest:
    # A union reports every branch that failed; the client meant the one that went deepest, or whose type at least was right.
    items = error.errors(include_url=False)
    first = items[0]["loc"][:1]
    branches = (item for item in items if item["loc"][:1] == first)
    item = max(branches, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))
    if item["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {item['msg'].removeprefix('Invalid JSON: ')}")
    if not item["loc"]:
        return InvalidRequest("the body must be a JSON object")
    param = _dotted(item["loc"])
    if item["type"] == "missing":
        return InvalidRequest(f"{param}: is required", param=param)
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return InvalidRequest(f"{param}: {message} (got {_shown(item['input'])})", param=param)


def _dotted(location: Sequence[int | str]) -> str:
    """`messages[0].content`: without the names of union branches, which no client knows."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _UNION_BRANCH.fullmatch(part):
            path += f".{part}" if path else part
    return path


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def check_model(request: GenerationRequest, card: ModelCard) -> None:
    """
    Raises:
        ModelNotFound: the request names another model.
    """
    if request.model != card.name:
        raise ModelNotFound(f"the model {_shown(request.model)} does not exist; served here: {card.name}", param="model")


def chat_messages(request: ChatCompletionRequest) -> list[dict[str, str]]:
    """The messages as the chat template sees them: content is one text.

    Raises:
        InvalidRequest: a message has no text, or has parts or tool calls that would have to be ignored.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, str]:
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if (message.model_extra or {}).get(name):
            raise InvalidRequest(f"{where}.{name}: is not supported here, and ignoring it would change the answer", param=f"{where}.{name}")
    role = "system" if message.role == "developer" else message.role  # the API's newer word for it, which templates do not know
    rendered = {"role": role, "content": _content_text(message, f"{where}.content")}
    optional = {"name": message.name, "reasoning_content": message.reasoning_content}
    return rendered | {key: value for key, value in optional.items() if value is not None}


def _content_text(message: ChatMessage, where: str) -> str:
    if message.content is None:
        raise InvalidRequest(f"{where}: is required", param=where)
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(message.content))


def _part_text(part: TextPart, where: str) -> str:
    if part.type != "text":
        raise InvalidRequest(f"{where}: parts of type {_shown(part.type)} are not supported, only text", param=where)
    if part.text is None:
        raise InvalidRequest(f"{where}.text: is required", param=f"{where}.text")
    return part.text


def completion_prompt(request: CompletionRequest, card: ModelCard) -> str | list[int]:
    """The one prompt: a text still to be tokenized, or checked token ids.

    Raises:
        InvalidRequest: empty, a batch of several, or a token id out of the vocabulary.
    """
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequest(f"prompt: a batch of {len(prompt)} prompts is not supported; send one request each", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    if isinstance(prompt, str):
        return prompt
    ids = [token_id for token_id in prompt if isinstance(token_id, int)]
    _check_token_ids(ids, "prompt", card)
    return ids


def _check_token_ids(token_ids: Sequence[int], param: str, card: ModelCard) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidRequest(f"{param}: token id {token_id} is not in 0..{card.vocab_size - 1}", param=param)


def sampling_params(request: GenerationRequest, num_prompt_tokens: int, card: ModelCard) -> SamplingParams:
    """Fills in every default; an unseeded request gets a seed here, so that a retry repeats the same text.

    Raises:
        InvalidRequest: fields contradict each other or name tokens out of the vocabulary.
        ContextTooLong: prompt and output do not fit the context.
    """
    max_tokens = _max_tokens(request, num_prompt_tokens, card)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: must be at most max_tokens ({max_tokens}), got {min_tokens}", param="min_tokens")
    stop_token_ids = request.stop_token_ids or []
    _check_token_ids(stop_token_ids, "stop_token_ids", card)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(64) if request.seed is None else request.seed & _UINT64,
        min_tokens=min_tokens,
        temperature=_given(request.temperature, 1.0),
        top_p=_given(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_given(request.min_p, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request, card),
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=_num_logprobs(request),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, card: ModelCard) -> int:
    room = card.max_model_len - num_prompt_tokens
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        if asked is not None and asked != request.max_completion_tokens:
            raise InvalidRequest("max_tokens: contradicts max_completion_tokens; send one of them", param="max_tokens")
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    if room < 1:
        prompt = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
        raise ContextTooLong(
            f"{prompt}: {num_prompt_tokens} tokens leave no room for output in the context of {card.max_model_len} tokens", param=prompt
        )
    if asked is None:
        return min(room, card.default_max_tokens or room)
    if asked > room:
        raise ContextTooLong(
            f"{param}: {num_prompt_tokens} prompt tokens + {asked} = {num_prompt_tokens + asked}, over the context of "
            f"{card.max_model_len} tokens; at most {room} fit",
            param=param,
        )
    return asked


def _logit_bias(request: GenerationRequest, card: ModelCard) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text, bias in (request.logit_bias or {}).items():
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise InvalidRequest(f"logit_bias: {_shown(text)} is not a token id", param="logit_bias")
        pairs.append((int(text), bias))
    _check_token_ids([token_id for token_id, _ in pairs], "logit_bias", card)
    return tuple(pairs)


def _num_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if not isinstance(request, ChatCompletionRequest):
        return None
    if not request.logprobs:
        if request.top_logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
        return None
    return request.top_logprobs or 0
