"""The gateway of one model: what its HTTP routes share, and the path from a checked request to its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from cluster.config import GatewayConfig
from cluster.errors import BatonError, InternalError
from router.control.client import RouterClient
from router.gateway.answer import Answer
from router.gateway.formats import AnswerHead, ChatFormat, CompletionFormat
from router.gateway.job import Job
from router.gateway.metrics import GatewayMetrics
from router.gateway.model_card import ModelCard
from router.gateway.placements import PlacementBook
from router.gateway.run import RequestRun
from router.gateway.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from router.gateway.text_stream import TextStream
from router.gateway.tokenizer import Tokenizer
from router.gateway.validation import chat_messages, check_model, completion_prompt, sampling_params
from router.gateway.worker_clients import WorkerClients

HEARTBEAT_INTERVAL_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a client says in headers."""

    started_s: float  # time.monotonic() when the request arrived
    timeout_s: float
    wants_timings: bool = False


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What a gateway is made of."""

    card: ModelCard
    tokenizer: Tokenizer
    router: RouterClient
    workers: WorkerClients
    config: GatewayConfig
    metrics: GatewayMetrics
    metrics_text: Callable[[], Awaitable[str]]  # one scrape of the whole cluster


class Gateway:
    """Life: constructed, `start`, answers, `close`."""

    def __init__(self, parts: GatewayParts) -> None:
        self.card = parts.card
        self.router = parts.router
        self.config = parts.config
        self.metrics = parts.metrics
        self.metrics_text = parts.metrics_text
        self.book = PlacementBook(parts.router, gateway_id=f"gateway-{uuid.uuid4().hex}")
        self._tokenizer = parts.tokenizer
        self._workers = parts.workers
        self._heart: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the heartbeats."""
        self._heart = asyncio.create_task(self.book.heartbeat_forever(HEARTBEAT_INTERVAL_S))

    async def close(self) -> None:
        """Ends what is left: running requests fail. Idempotent."""
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.gather(self._heart, return_exceptions=True)
        await self._workers.close()
        await self.book.settle()

    def check_health(self) -> None:
        """
        Raises:
            InternalError: the heart has stopped, so the router will end this gateway's placements.
        """
        if self._heart is not None and self._heart.done():
            raise InternalError("the gateway's heartbeats have stopped")

    async def chat(self, request: ChatCompletionRequest, options: CallOptions) -> Answer:
        """Checks, renders and tokenizes; nothing is sent to a worker before the answer is read.

        Raises:
            RequestError: the request is at fault.
        """
        check_model(request, self.card)
        prompt = await self._tokenizer.encode_chat(chat_messages(request), request.chat_template_kwargs)
        return self._answer(request, prompt, options, prefix="chatcmpl")

    async def complete(self, request: CompletionRequest, options: CallOptions) -> Answer:
        """As `chat`, for a plain prompt."""
        check_model(request, self.card)
        prompt = completion_prompt(request, self.card)
        token_ids = await self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self._answer(request, token_ids, options, prefix="cmpl")

    def describe_model(self) -> dict[str, Any]:
        """The model as `/v1/cluster` shows it."""
        return asdict(self.card)

    def _answer(self, request: GenerationRequest, prompt: list[int], options: CallOptions, *, prefix: str) -> Answer:
        sampling = sampling_params(request, len(prompt), self.card)
        job = Job(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            started_s=options.started_s,
            deadline_s=options.started_s + options.timeout_s,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
        )

        def begin(failure: BatonError | None) -> tuple[RequestRun, TextStream]:
            if failure is not None:
                self.metrics.retries.labels(failure.code).inc()
            one = job if failure is None else replace(job, request_id=uuid.uuid4().hex)  # the id of a finished request is not used again
            run = RequestRun(one, self.book, self._workers, self.metrics, max_attempts=self.config.max_attempts)
            detokenizer = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens is not False)
            return run, TextStream(run, detokenizer, request.stops, min_tokens=sampling.min_tokens)

        head = AnswerHead(f"{prefix}-{job.request_id}", int(time.time()), self.card.name, self.card.system_fingerprint)
        answer_format = (ChatFormat if prefix == "chatcmpl" else CompletionFormat)(head, self._tokenizer, sampling.num_logprobs)
        return Answer(
            begin, answer_format,
            num_prompt_tokens=len(prompt), includes_usage=request.includes_usage, wants_timings=options.wants_timings,
        )  # fmt: skip
