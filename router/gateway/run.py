"""`RequestRun` owns one request from admission to its last token.

    1. admit     the router queues it and answers with a placement
    2. prefill   KVOffer → Ready* → FirstToken; the first token goes out at once, and the stream stays open for the blocks' sake
    3. decode    with the ticket: KVTaken → Tokens* (`handoff` finds the worker). It begins at the offer, so that the KV travels while
                 the rest of the prompt is computed; without overlap, after the first token
       or, where one worker does both (no prefill in the placement): Prefilled → Tokens*

A worker's failure starts again at 1 (same seed, same order key, without the worker that failed). After the first token too, unless the
config says `fail`: the prompt is prefilled again, the decode worker replays what the reader has, and the same text goes on (promise P0).
However the run ends (last token, error, closed by its reader, cancelled, deadline), one `finally` cancels what is open and ends the
placement; it does not wait for anything, so a cancellation cannot cut it short.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from cluster.convert import finish_reason_from_pb, output_from_pb
from cluster.errors import DeadlineExceeded, InternalError, StaleEpoch
from cluster.pb import worker_pb2 as pb
from cluster.types import AdmitRequest, FinishReason, OrderKey, Placement, Request, StageTimings, TokenOutput, WorkerAddress
from router.gateway.handoff import DecodeStream, HandedOver, Handoff
from router.gateway.job import Job
from router.gateway.legs import AttemptFailed, Legs, blaming, expect
from router.gateway.metrics import GatewayMetrics
from router.gateway.placements import PlacementBook
from router.gateway.prefill_leg import PrefillLeg
from router.gateway.timeline import Timeline
from router.gateway.worker_clients import WorkerClients

_MOST_ATTEMPTS: Final = 30  # in all: a request that ends each worker it comes to shall not meet all of them


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens that arrived together; the last chunk of a run has a finish reason."""

    outputs: tuple[TokenOutput, ...]
    finish_reason: FinishReason | None


class RequestRun:
    """One run of one job. Read `tokens()` once, inside `contextlib.aclosing`."""

    def __init__(
        self,
        job: Job,
        book: PlacementBook,
        workers: WorkerClients,
        metrics: GatewayMetrics,
        *,
        max_attempts: int,
        recomputes: bool,
        overlaps: bool,
    ) -> None:
        """
        Args:
            max_attempts: in a row without a new token.
            recomputes: workers may fail after the first token too.
            overlaps: KV travels while its prompt is being computed.
        """
        self._job = job
        self._book = book
        self._workers = workers
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._recomputes = recomputes
        self._overlaps = overlaps
        self._timeline = Timeline(job.started_s, metrics)
        self._handoff = Handoff(job, book, workers, metrics, self._timeline, max_failures=max_attempts)
        self._legs = Legs()
        self._order_key: OrderKey | None = None
        self._excluded: list[str] = []
        self._generated: list[int] = []
        self.num_cached_tokens = 0

    @property
    def timings(self) -> StageTimings:
        """Where the time went, so far."""
        return self._timeline.timings()

    def complete(self) -> None:
        """The reader has the whole answer: its last token, or a stop string. Enters the times in the metrics."""
        self._timeline.finished()

    async def tokens(self) -> AsyncGenerator[TokenChunk, None]:
        """
        Raises:
            BatonError: the request cannot be served, or not to its end.
        """
        try:
            num_failures = 0  # in a row: a token in between is progress
            for attempt in itertools.count(1):
                num_before = len(self._generated)
                try:
                    async with aclosing(self._attempt(attempt)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    return
                except AttemptFailed as failure:
                    num_failures = num_failures + 1 if len(self._generated) == num_before else 1
                    if num_failures >= self._max_attempts or attempt >= _MOST_ATTEMPTS or (self._generated and not self._recomputes):
                        raise failure.error from failure
                    self._retire(failure)
        finally:
            self._legs.close()
            self._book.finish(self._job.request_id)

    async def _attempt(self, attempt: int) -> AsyncGenerator[TokenChunk, None]:
        placement = await self._place()
        request = Request(
            request_id=self._job.request_id,
            attempt=attempt,
            prompt_token_ids=self._job.prompt_token_ids,
            sampling=self._job.sampling,
            order_key=placement.order_key,
            cache_salt=self._job.cache_salt,
            generated_token_ids=tuple(self._generated),
        )
        legs = self._one_leg(placement, request) if placement.prefill is None else self._two_legs(placement, placement.prefill, request)
        async with aclosing(legs) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _place(self) -> Placement:
        timeout_s = self._job.remaining_s()
        admission = AdmitRequest(
            request_id=self._job.request_id,
            gateway_id=self._book.gateway_id,
            num_prompt_tokens=len(self._job.prompt_token_ids),
            max_tokens=self._job.sampling.max_tokens,
            priority=self._job.priority,
            timeout_s=timeout_s,
            order_key=self._order_key,
            exclude=tuple(self._excluded),
        )
        try:
            async with asyncio.timeout(timeout_s):
                placement = await self._book.admit(admission)
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline passed in the queue") from error
        self._order_key = placement.order_key
        self._timeline.placed(placement.queue_time_s)
        return placement

    async def _one_leg(self, placement: Placement, request: Request) -> AsyncGenerator[TokenChunk, None]:
        with blaming(placement.decode):
            stream = self._legs.open(self._workers.decode(placement.decode, placement.router_epoch, request, self._job.remaining_s()))
            event = expect(await stream.read(), "prefilled").prefilled
            self._set_cached(event.num_cached_tokens)
            self._timeline.prefilled(event.wait_s, event.prefill_s)
            async with aclosing(self._token_chunks(stream)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _two_legs(self, placement: Placement, worker: WorkerAddress, request: Request) -> AsyncGenerator[TokenChunk, None]:
        stream = self._legs.open(self._workers.prefill(worker, placement.router_epoch, request, self._job.remaining_s()))
        prefill = PrefillLeg(stream, self._legs, self._timeline)
        with blaming(worker):
            self._set_cached((await prefill.offer()).num_cached_tokens)
        handoff = self._begin_handoff(placement, request, prefill) if self._may_overlap(request) else None
        first = await self._first_token(prefill, worker, handoff)
        chunk = TokenChunk((output_from_pb(first.output),), finish_reason_from_pb(first.finish_reason))
        if self._generated:
            self._check_repeated(chunk)
        else:
            self._count(chunk)
            yield chunk
        if chunk.finish_reason is not None:
            return
        decode, decode_worker = await (handoff or self._begin_handoff(placement, request, prefill))
        with blaming(decode_worker):
            async with aclosing(self._token_chunks(decode)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _may_overlap(self, request: Request) -> bool:
        """A request that ends with its first token has no decode leg."""
        return self._overlaps and request.sampling.max_tokens > 1

    def _begin_handoff(self, placement: Placement, request: Request, prefill: PrefillLeg) -> asyncio.Task[HandedOver]:
        return self._legs.spawn(self._handoff.run(placement, request, prefill, self._legs))

    async def _first_token(self, prefill: PrefillLeg, worker: WorkerAddress, handoff: asyncio.Task[HandedOver] | None) -> pb.FirstToken:
        """Fails with whichever leg fails first."""

        async def first_token() -> pb.FirstToken:
            with blaming(worker):
                return await prefill.first_token()

        return await first_token() if handoff is None else await self._legs.linked(first_token(), handoff)

    async def _token_chunks(self, stream: DecodeStream) -> AsyncGenerator[TokenChunk, None]:
        while True:
            tokens = expect(await stream.read(), "tokens").tokens
            chunk = TokenChunk(tuple(map(output_from_pb, tokens.outputs)), finish_reason_from_pb(tokens.finish_reason))
            self._count(chunk, tokens.decode_wait_s, tokens.step_s)
            yield chunk
            if chunk.finish_reason is not None:
                return

    def _count(self, chunk: TokenChunk, decode_wait_s: float = 0.0, step_s: float = 0.0) -> None:
        if not self._generated:
            self._metrics.prompt_tokens.inc(len(self._job.prompt_token_ids))
            self._metrics.cached_tokens.inc(self.num_cached_tokens)
        self._generated += [output.token_id for output in chunk.outputs]
        self._metrics.output_tokens.inc(len(chunk.outputs))
        self._timeline.tokens(len(chunk.outputs), decode_wait_s, step_s)

    def _set_cached(self, num_cached_tokens: int) -> None:
        if not self._generated:  # later attempts find what the first one has left in a cache
            self.num_cached_tokens = num_cached_tokens

    def _check_repeated(self, first: TokenChunk) -> None:
        """Raises:
        InternalError: the prompt's first token is another than the one that the reader has.
        """
        if first.finish_reason is not None or first.outputs[0].token_id != self._generated[0]:
            raise InternalError("an attempt began with another token than the one before it")

    def _retire(self, failure: AttemptFailed) -> None:
        self._metrics.retries.labels(failure.error.code).inc()
        if not isinstance(failure.error, StaleEpoch):  # that is the placement's fault, not the worker's
            self._excluded.append(failure.worker.incarnation)
        self._legs.close()
        self._timeline.attempt_failed()
