"""What the OpenAI endpoints answer with. Fields that were never set are left out; those set to null are sent as null."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReasonText = Literal["stop", "length"]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())

    def to_json(self) -> str:
        """The body, or one event's data."""
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(_Message):
    cached_tokens: int  # as prefill saw it: to the decode worker all of the prompt comes from a cache


class Usage(_Message):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Message):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Message):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(_Message):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatMessageOut(_Message):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatDelta(_Message):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(_Message):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText


class ChatChunkChoice(_Message):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText | None


class CompletionChoice(_Message):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonText | None


class _Envelope(_Message):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    timings: dict[str, float] | None = None  # on request: seconds by stage


class ChatCompletion(_Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(_Envelope):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
