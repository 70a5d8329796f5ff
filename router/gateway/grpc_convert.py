"""Between the gateway's own values and the messages of `proto/inference.proto`: pb types stop here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cluster.pb import inference_pb2 as pb
from cluster.types import FinishReason
from router.gateway.generation import Generation
from router.gateway.model_card import ModelCard
from router.gateway.schema import CompletionRequest
from router.gateway.text_stream import TextDelta, TextToken
from router.gateway.validation import check_fields

TokenBytes = Callable[[int], bytes]

_FINISH_TO_PB: Final = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def completion_request(message: pb.GenerateRequest) -> CompletionRequest:
    """The same request as the body of `/v1/completions`; errors name the message's fields.

    Raises:
        InvalidRequest: a value out of its limits.
    """
    given: dict[str, Any] = {descriptor.name: value for descriptor, value in message.ListFields()}
    fields = {name: value for name, value in given.items() if name in CompletionRequest.model_fields}
    if "text" in given:
        fields["prompt"] = message.text
    elif "token_ids" in given:
        fields["prompt"] = list(message.token_ids.ids)
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = list(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in message.logit_bias.items()}
    return check_fields(CompletionRequest, fields)


def response(delta: TextDelta, generation: Generation, token_bytes: TokenBytes, *, wants_timings: bool) -> pb.GenerateResponse:
    """One message of the stream, the last with what is known only then."""
    message = pb.GenerateResponse(text=delta.text, tokens=[_token(token, token_bytes) for token in delta.tokens])
    if delta.finish_reason is not None:
        message.finish_reason = _FINISH_TO_PB[delta.finish_reason]
        message.usage.CopyFrom(_usage(generation))
        message.timings.update(generation.timings() if wants_timings else {})
    return message


def model(card: ModelCard) -> pb.GetModelResponse:
    """The served model."""
    return pb.GetModelResponse(
        name=card.name,
        created=card.created,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        system_fingerprint=card.system_fingerprint,
        default_max_tokens=card.default_max_tokens,
    )


def _token(token: TextToken, token_bytes: TokenBytes) -> pb.Token:
    output = token.output
    return pb.Token(
        token_id=output.token_id,
        text_offset=token.text_offset,
        bytes=token_bytes(output.token_id),
        logprob=output.logprob,
        top_logprobs=[
            pb.TokenLogprob(token_id=token_id, bytes=token_bytes(token_id), logprob=logprob) for token_id, logprob in output.top_logprobs
        ],
    )


def _usage(generation: Generation) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_output_tokens,
        cached_tokens=generation.num_cached_tokens,
    )
