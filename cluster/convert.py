"""Between `cluster.types` and the messages of `proto/worker.proto`: pb types stop here, at the edge."""

from __future__ import annotations

from typing import Final

from cluster.pb import worker_pb2 as pb
from cluster.types import FinishReason, OrderKey, Request, SamplingParams, TokenOutput

_FINISH_TO_PB: Final = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB: Final = {value: reason for reason, value in _FINISH_TO_PB.items()}


def finish_reason_to_pb(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return _FINISH_TO_PB[reason]


def finish_reason_from_pb(value: pb.FinishReason.ValueType) -> FinishReason | None:
    return _FINISH_FROM_PB[value]


def request_to_pb(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_pb(request.sampling),
        order_key=pb.OrderKey(virtual_deadline_s=request.order_key.virtual_deadline_s, arrival=request.order_key.arrival),
        cache_salt=request.cache_salt,
        generated_token_ids=request.generated_token_ids,
    )


def request_from_pb(message: pb.Request) -> Request:
    return Request(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_pb(message.sampling),
        order_key=OrderKey(message.order_key.virtual_deadline_s, message.order_key.arrival),
        cache_salt=message.cache_salt,
        generated_token_ids=tuple(message.generated_token_ids),
    )


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=_pairs_to_pb(sampling.logit_bias),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        num_logprobs=sampling.num_logprobs,
    )


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple((pair.token_id, pair.value) for pair in message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def output_to_pb(output: TokenOutput) -> pb.TokenOutput:
    return pb.TokenOutput(token_id=output.token_id, logprob=output.logprob, top_logprobs=_pairs_to_pb(output.top_logprobs))


def output_from_pb(message: pb.TokenOutput) -> TokenOutput:
    return TokenOutput(
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((pair.token_id, pair.value) for pair in message.top_logprobs),
    )


def _pairs_to_pb(pairs: tuple[tuple[int, float], ...]) -> list[pb.TokenValue]:
    return [pb.TokenValue(token_id=token_id, value=value) for token_id, value in pairs]
