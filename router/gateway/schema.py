"""What a client may send to `/v1/chat/completions` and `/v1/completions`.

Types are strict: "5" is not 5 and true is not 1. null means the default everywhere. What Baton does not know lands in `model_extra`.
Limits that need the model (context, vocabulary) are checked in `validation`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from router.gateway.chat_template import RESERVED_NAMES

MAX_STOPS: Final = 4
_SAFE_INT: Final = 2**31 - 1

PositiveInt = Annotated[int, Field(ge=1, le=_SAFE_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    """How a stream ends."""

    include_usage: bool | None = None


class GenerationRequest(_Body):
    """What both endpoints share."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_SAFE_INT)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_SAFE_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=_SAFE_INT)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream's last chunk carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class TextPart(_Body):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(_Body):
    """One message. The roles are those that need no tools."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None


def _not_reserved(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := sorted(RESERVED_NAMES & value.keys()):
        raise ValueError(f"{reserved[0]} is set by the server")
    return value


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_not_reserved)] | None = None


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`. `prompt` is a text or its token ids; a list of one prompt is that prompt."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
