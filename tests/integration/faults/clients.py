"""Three ways to ask Baton, as clients do: the openai client, streaming or not, and gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import openai
from grpc import aio
from openai import AsyncOpenAI

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from deploy.examples.grpc_client_asyncio import retrying_channel
from tests.integration.faults.questions import MODEL, Question
from tests.integration.served import Served

TIMEOUT_S: Final = 180.0  # an answer that takes longer hangs
_MAX_RETRIES: Final = 12  # the openai client's own: for about a minute
_OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1),)  # no channel shares it, so closing one closes it
_FINISH: Final = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Way(Enum):
    """How a client asks."""

    STREAM = "stream"
    WHOLE = "whole"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Piece:
    """What arrived at once. The last one has a finish reason and the usage (prompt and output tokens)."""

    text: str = ""
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None


class Failure(Exception):
    """An answer that did not come, or not whole, as its client sees it.

    `kind` is `status` and `event` (HTTP), `grpc`, `broken` (the connection), `unfinished` (an end without a finish reason) or `hangs`.
    """

    def __init__(self, kind: str, code: str) -> None:
        super().__init__(f"{kind} {code}")
        self.kind = kind
        self.code = code


class Clients:
    """One user's connections. Closing a generator of pieces early leaves the request."""

    def __init__(self, http: AsyncOpenAI, channel: aio.Channel) -> None:
        self._http = http
        self._stub: Any = InferenceStub(channel)
        self.channel = channel

    async def pieces(self, question: Question, way: Way, *, timeout_s: float | None = None) -> AsyncGenerator[Piece, None]:
        """`timeout_s` is told to the server as the request's deadline.

        Raises:
            Failure: no answer, or none to the end.
        """
        read = {Way.STREAM: self._stream, Way.WHOLE: self._whole, Way.GRPC: self._grpc}[way]
        finish_reason = None
        try:
            async for piece in read(question, timeout_s):
                finish_reason = piece.finish_reason or finish_reason
                yield piece
        except (openai.APIError, aio.AioRpcError) as error:
            raise _failure(error) from error
        if finish_reason is None:
            raise Failure("unfinished", "")

    async def _stream(self, question: Question, timeout_s: float | None) -> AsyncGenerator[Piece, None]:
        options = {**_body(question, timeout_s), "stream": True, "stream_options": {"include_usage": True}}
        async with await self._http.completions.create(**options) as stream:
            held = Piece()
            async for chunk in stream:
                if chunk.usage is not None:
                    held = Piece(held.text, held.finish_reason, (chunk.usage.prompt_tokens, chunk.usage.completion_tokens))
                for choice in chunk.choices:
                    if choice.finish_reason is None:
                        yield Piece(choice.text)
                    else:
                        held = Piece(choice.text, choice.finish_reason)
            if held.finish_reason is not None:
                yield held

    async def _whole(self, question: Question, timeout_s: float | None) -> AsyncGenerator[Piece, None]:
        answer = await self._http.completions.create(**_body(question, timeout_s))
        choice = answer.choices[0]
        yield Piece(choice.text, choice.finish_reason, (answer.usage.prompt_tokens, answer.usage.completion_tokens))

    async def _grpc(self, question: Question, timeout_s: float | None) -> AsyncGenerator[Piece, None]:
        call = self._stub.Generate(_message(question), timeout=timeout_s)
        try:
            async for message in call:
                finish_reason = _FINISH.get(message.finish_reason)
                usage = (message.usage.prompt_tokens, message.usage.completion_tokens) if finish_reason else None
                yield Piece(message.text, finish_reason, usage)
        finally:
            call.cancel()


@asynccontextmanager
async def connected(served: Served, *, retries: bool = False) -> AsyncIterator[Clients]:
    """A user of `served`; with `retries`, one that outlives what it can."""
    http = served.client().with_options(max_retries=_MAX_RETRIES if retries else 0, timeout=TIMEOUT_S)
    channel = retrying_channel(served.grpc_target) if retries else aio.insecure_channel(served.grpc_target, options=_OWN_CONNECTION)
    async with http, channel:
        yield Clients(http, channel)


def _body(question: Question, timeout_s: float | None) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        "extra_body": {"ignore_eos": question.ignore_eos, "priority": question.priority, "cache_salt": question.cache_salt},
        "extra_headers": {} if timeout_s is None else {"x-request-timeout-s": str(timeout_s)},
    }


def _message(question: Question) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=MODEL,
        text=question.prompt,
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        seed=question.seed,
        ignore_eos=question.ignore_eos,
        priority=question.priority,
        cache_salt=question.cache_salt,
    )


def _failure(error: openai.APIError | aio.AioRpcError) -> Failure:
    match error:
        case aio.AioRpcError():
            return Failure("grpc", error.code().name)
        case openai.APITimeoutError():
            return Failure("hangs", "")
        case openai.APIConnectionError():
            return Failure("broken", type(error.__cause__).__name__)
        case openai.APIStatusError():
            return Failure("status", f"{error.status_code} {error.code}")
    return Failure("event", str(error.code))
