"""`/v1/chat/completions`, `/v1/completions`, `/v1/models`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from cluster.errors import BatonError, ClientGone, InternalError, InvalidRequest, ModelNotFound
from router.gateway.answer import Answer
from router.gateway.call_record import CallRecord
from router.gateway.error_body import error_event
from router.gateway.gateway import MAX_TIMEOUT_S, CallOptions, Gateway
from router.gateway.http_io import DONE, TIMEOUT_HEADER, EventStream, read_body, while_connected
from router.gateway.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from router.gateway.validation import parse_request

R = TypeVar("R", bound=GenerationRequest)

_LOG = logging.getLogger(__name__)

TIMINGS_HEADER: Final = "x-baton-timings"


def openai_router(gateway: Gateway) -> APIRouter:
    """The routes that OpenAI clients call."""
    router = APIRouter(prefix="/v1")
    card = gateway.card
    model = {"id": card.name, "object": "model", "created": card.created, "owned_by": "baton", "max_model_len": card.max_model_len}

    @router.post("/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        return await _Call(gateway, "chat", request).respond(ChatCompletionRequest, gateway.chat)

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await _Call(gateway, "completions", request).respond(CompletionRequest, gateway.complete)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != card.name:
            raise ModelNotFound(f"the model {name!r} does not exist; served here: {card.name}", param="model")
        return model

    return router


class _Call:
    """One HTTP request for an answer."""

    def __init__(self, gateway: Gateway, endpoint: str, request: Request) -> None:
        self._gateway = gateway
        self._request = request
        self._started_s = time.monotonic()
        self._record = CallRecord(gateway.metrics, endpoint)

    async def respond(self, kind: type[R], prepare: Callable[[R, CallOptions], Coroutine[Any, Any, Answer]]) -> Response:
        """The whole answer, or its stream once the first event is there.

        Raises:
            BatonError: before the first byte, so it becomes a status.
        """
        with self._record.counting_failures():
            options = self._options()
            parsed = parse_request(kind, await read_body(self._request, self._gateway.config.max_body_bytes))
            answer = await while_connected(self._request.receive, prepare(parsed, options))
            if parsed.stream:
                events = self._events(answer)
                first = await while_connected(self._request.receive, anext(events))
                return EventStream(first, events)
            whole = await while_connected(self._request.receive, answer.whole())
        self._record.end(answer.outcome)
        return Response(whole.to_json(), media_type="application/json")

    async def _events(self, answer: Answer) -> AsyncGenerator[str, None]:
        """An error after the first event ends the stream as an event, without `[DONE]`: no client takes the answer for whole."""
        has_begun = False
        try:
            async with aclosing(answer.events()) as events:
                async for event in events:
                    yield event
                    has_begun = True
            self._record.end(answer.outcome)
            yield DONE
        except BatonError as error:
            self._record.end(error.code)
            if not has_begun:
                raise
            yield error_event(error)
        except Exception as error:
            self._record.end(InternalError.code)
            if not has_begun:
                raise
            _LOG.error("bug in the gateway, in a stream", exc_info=error)
            yield error_event(InternalError("internal error of the gateway"))
        finally:
            self._record.end(ClientGone.code)  # counts when nothing else did: the reader closed us

    def _options(self) -> CallOptions:
        headers = self._request.headers
        text = headers.get(TIMEOUT_HEADER)
        timeout_s = self._gateway.config.request_timeout_s if text is None else _timeout_s(text)
        return CallOptions(self._started_s, timeout_s, wants_timings=headers.get(TIMINGS_HEADER) == "1")


def _timeout_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_TIMEOUT_S:
        message = f"header {TIMEOUT_HEADER}: must be seconds, above 0 and at most {MAX_TIMEOUT_S:.0f} (got {text[:40]!r})"
        raise InvalidRequest(message, param=TIMEOUT_HEADER)
    return value
