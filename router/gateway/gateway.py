"""The gateway of one model: what its HTTP routes and gRPC services share, and the path from a checked request to its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from cluster.books import ClusterBooks, ProcessBooks, faults_of
from cluster.config import GatewayConfig
from cluster.errors import BatonError, InternalError, NoCapacity
from router.control.client import RouterClient
from router.control.messages import Ready
from router.gateway.answer import Answer
from router.gateway.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat
from router.gateway.generation import Generation
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

HEARTBEAT_INTERVAL_S: Final = 1.0
ROUTER_TIMEOUT_S: Final = 5.0  # of questions about the cluster's state
MAX_TIMEOUT_S: Final = 86_400.0  # of a request


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a client says beside the request itself."""

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
    overlaps: bool  # KV travels while its prompt is being computed
    metrics: GatewayMetrics
    metrics_text: Callable[[], Awaitable[str]]  # one scrape of the whole cluster
    cluster_books: Callable[[], Awaitable[ClusterBooks]]


class Gateway:
    """Life: constructed, `start`, answers, `close`."""

    def __init__(self, parts: GatewayParts) -> None:
        self.card = parts.card
        self.router = parts.router
        self.config = parts.config
        self.metrics = parts.metrics
        self.metrics_text = parts.metrics_text
        self.cluster_books = parts.cluster_books
        self.book = PlacementBook(parts.router, gateway_id=f"gateway-{uuid.uuid4().hex}")
        self._tokenizer = parts.tokenizer
        self._workers = parts.workers
        self._overlaps = parts.overlaps
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

    async def ready(self) -> Ready:
        """Whether a request that came now could be served."""
        try:
            async with asyncio.timeout(ROUTER_TIMEOUT_S):
                return await self.router.ready()
        except (BatonError, TimeoutError) as error:
            return Ready(False, f"the router does not answer: {str(error) or 'timeout'}")

    async def describe_cluster(self) -> dict[str, Any]:
        """The model, and the router's books.

        Raises:
            NoCapacity: the router does not answer.
        """
        try:
            async with asyncio.timeout(ROUTER_TIMEOUT_S):
                return {"model": asdict(self.card), **await self.router.snapshot()}
        except TimeoutError as error:
            raise NoCapacity("the router does not answer: timeout", retry_after_s=1.0) from error

    def books(self) -> ProcessBooks:
        """What this gateway holds, and whether its books are right."""
        return ProcessBooks(
            kind="gateway",
            name=self.book.gateway_id,
            held={
                "requests": len(self.metrics.live_calls),
                "placements": len(self.book.live_ids),
                "worker_calls": self._workers.num_calls,
                "router_calls": self.book.num_calls,
            },
            faults=faults_of(self.book.check_integrity),
            requests=tuple(sorted(self.book.request_ids)),
        )

    async def chat(self, request: ChatCompletionRequest, options: CallOptions) -> Answer:
        """Checks, renders and tokenizes; nothing is sent to a worker before the answer is read.

        Raises:
            RequestError: the request is at fault.
        """
        check_model(request, self.card)
        prompt = await self._tokenizer.encode_chat(chat_messages(request), request.chat_template_kwargs)
        return self._answer(request, self._generation(request, prompt, options), options, ChatFormat)

    async def complete(self, request: CompletionRequest, options: CallOptions) -> Answer:
        """As `chat`, for a plain prompt."""
        return self._answer(request, await self.generate(request, options), options, CompletionFormat)

    async def generate(self, request: CompletionRequest, options: CallOptions) -> Generation:
        """As `complete`, in no API's shape."""
        check_model(request, self.card)
        prompt = completion_prompt(request, self.card)
        token_ids = await self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self._generation(request, token_ids, options)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, which may be part of a character."""
        return self._tokenizer.token_bytes[token_id]

    def _generation(self, request: GenerationRequest, prompt: list[int], options: CallOptions) -> Generation:
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
        run = RequestRun(
            job,
            self.book,
            self._workers,
            self.metrics,
            max_attempts=self.config.max_attempts,
            recomputes=self.config.failure_policy == "recompute",
            overlaps=self._overlaps,
        )
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens is not False)
        return Generation(job, run, TextStream(run, detokenizer, request.stops, min_tokens=sampling.min_tokens))

    def _answer(self, request: GenerationRequest, generation: Generation, options: CallOptions, kind: type[AnswerFormat]) -> Answer:
        head = AnswerHead(f"{kind.id_prefix}-{generation.request_id}", int(time.time()), self.card.name, self.card.system_fingerprint)
        answer_format = kind(head, self._tokenizer, generation.num_logprobs)
        return Answer(generation, answer_format, includes_usage=request.includes_usage, wants_timings=options.wants_timings)
