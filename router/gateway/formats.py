"""The two shapes of an answer: chat and plain completion, whole or in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from cluster.types import FinishReason, TokenOutput
from router.gateway import responses as out
from router.gateway.text_stream import TextDelta, TextToken
from router.gateway.tokenizer import Tokenizer

_LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity; the OpenAI API's own word for "as good as impossible"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    answer_id: str
    created: int  # Unix time
    model: str
    system_fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.answer_id, "created": self.created, "model": self.model, "system_fingerprint": self.system_fingerprint}


class AnswerFormat(ABC):
    """Builds one answer's messages. `extras` are the envelope's optional fields: `usage`, `timings`."""

    id_prefix: ClassVar[str]

    def __init__(self, head: AnswerHead, tokenizer: Tokenizer, num_logprobs: int | None) -> None:
        self._head = head.fields()
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs

    @abstractmethod
    def whole(self, deltas: Sequence[TextDelta], **extras: Any) -> out.ChatCompletion | out.Completion:
        """The answer at once."""

    @abstractmethod
    def chunk(self, delta: TextDelta, *, is_first: bool, **extras: Any) -> out.ChatCompletionChunk | out.Completion:
        """One event of a stream."""

    @abstractmethod
    def tail(self, **extras: Any) -> out.ChatCompletionChunk | out.Completion:
        """The event after the last delta: no choices, only the extras."""


class ChatFormat(AnswerFormat):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"

    def whole(self, deltas: Sequence[TextDelta], **extras: Any) -> out.ChatCompletion:
        message = out.ChatMessageOut(role="assistant", content=_text(deltas), refusal=None)
        logprobs = self._logprobs(token for delta in deltas for token in delta.tokens)
        choice = out.ChatChoice(index=0, message=message, logprobs=logprobs, finish_reason=_reason(deltas[-1]))
        return out.ChatCompletion(object="chat.completion", choices=[choice], **self._head, **extras)

    def chunk(self, delta: TextDelta, *, is_first: bool, **extras: Any) -> out.ChatCompletionChunk:
        content: dict[str, Any] = {"content": delta.text} if delta.text or is_first else {}
        role: dict[str, Any] = {"role": "assistant"} if is_first else {}
        choice = out.ChatChunkChoice(
            index=0, delta=out.ChatDelta(**role, **content), logprobs=self._logprobs(delta.tokens), finish_reason=_reason_or_none(delta)
        )
        return out.ChatCompletionChunk(object="chat.completion.chunk", choices=[choice], **self._head, **extras)

    def tail(self, **extras: Any) -> out.ChatCompletionChunk:
        return out.ChatCompletionChunk(object="chat.completion.chunk", choices=[], **self._head, **extras)

    def _logprobs(self, tokens: Iterable[TextToken]) -> out.ChatLogprobs | None:
        if self._num_logprobs is None:
            return None
        return out.ChatLogprobs(content=[self._entry(token.output) for token in tokens], refusal=None)

    def _entry(self, output: TokenOutput) -> out.TokenLogprob:
        likeliest = [out.TopLogprob(**self._candidate(*pair)) for pair in output.top_logprobs]
        return out.TokenLogprob(**self._candidate(output.token_id, output.logprob), top_logprobs=likeliest)

    def _candidate(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes[token_id]),
        }


class CompletionFormat(AnswerFormat):
    """`/v1/completions`."""

    id_prefix = "cmpl"

    def whole(self, deltas: Sequence[TextDelta], **extras: Any) -> out.Completion:
        tokens = [token for delta in deltas for token in delta.tokens]
        return self._answer(_text(deltas), tokens, _reason(deltas[-1]), **extras)

    def chunk(self, delta: TextDelta, *, is_first: bool, **extras: Any) -> out.Completion:
        return self._answer(delta.text, delta.tokens, _reason_or_none(delta), **extras)

    def tail(self, **extras: Any) -> out.Completion:
        return out.Completion(object="text_completion", choices=[], **self._head, **extras)

    def _answer(self, text: str, tokens: Sequence[TextToken], reason: out.FinishReasonText | None, **extras: Any) -> out.Completion:
        choice = out.CompletionChoice(index=0, text=text, logprobs=self._logprobs(tokens), finish_reason=reason)
        return out.Completion(object="text_completion", choices=[choice], **self._head, **extras)

    def _logprobs(self, tokens: Sequence[TextToken]) -> out.CompletionLogprobs | None:
        if self._num_logprobs is None:
            return None
        return out.CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token.output.token_id) for token in tokens],
            token_logprobs=[_finite(token.output.logprob) for token in tokens],
            top_logprobs=[self._candidates(token.output) for token in tokens],
            text_offset=[token.text_offset for token in tokens],
        )

    def _candidates(self, output: TokenOutput) -> dict[str, float]:
        pairs = [*output.top_logprobs, (output.token_id, output.logprob)]
        return {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in pairs}


def _text(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _reason(delta: TextDelta) -> out.FinishReasonText:
    return "stop" if delta.finish_reason is FinishReason.STOP else "length"


def _reason_or_none(delta: TextDelta) -> out.FinishReasonText | None:
    return None if delta.finish_reason is None else _reason(delta)


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)
