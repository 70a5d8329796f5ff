"""`baton.v1.Inference`: the gRPC twin of `/v1/completions`, on the same generations.

Replies are written, not yielded: a cancel that lands while one is being sent is raised here, where it closes the run at once. A generator
would be left to the garbage collector, and workers would go on for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final

from grpc import aio

from cluster import rpc
from cluster.errors import BodyTooLarge, ClientGone, DeadlineExceeded, InternalError
from cluster.pb import inference_pb2 as pb
from cluster.pb import inference_pb2_grpc
from router.gateway import grpc_convert as convert
from router.gateway.call_record import CallRecord
from router.gateway.gateway import MAX_TIMEOUT_S, CallOptions, Gateway
from router.gateway.generation import Generation

_LOG = logging.getLogger(__name__)

REQUEST_ID_KEY: Final = "baton-request-id"
_DEADLINE_SLACK_S: Final = 0.1  # a client's clock ends the call a little before ours

Context = aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves one gateway's clients."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._live: dict[str, asyncio.Timeout] = {}  # by request id and by the client's own name: what `Abort` lets run out

    async def Generate(  # type: ignore[override]  # noqa: N802  # the stubs know generators only
        self, message: pb.GenerateRequest, context: Context
    ) -> None:
        record = CallRecord(self._gateway.metrics, "generate")
        async with _answering(context):
            with record.counting_failures():
                options = self._options(context)
                try:
                    await self._generate(message, options, context, record)
                except asyncio.CancelledError:
                    if time.monotonic() > options.started_s + options.timeout_s - _DEADLINE_SLACK_S:
                        record.end(DeadlineExceeded.code)
                    raise

    async def Abort(self, message: pb.AbortRequest, _context: Context) -> pb.AbortResponse:  # noqa: N802
        limit = self._live.pop(message.request_id, None)
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time())
        return pb.AbortResponse(aborted=limit is not None)

    async def GetModel(self, _message: pb.GetModelRequest, _context: Context) -> pb.GetModelResponse:  # noqa: N802
        return convert.model(self._gateway.card)

    async def _generate(self, message: pb.GenerateRequest, options: CallOptions, context: Context, record: CallRecord) -> None:
        limit_bytes = self._gateway.config.max_body_bytes
        if message.ByteSize() > limit_bytes:
            raise BodyTooLarge(f"the request is over the limit of {limit_bytes} bytes")
        generation = await self._gateway.generate(convert.completion_request(message), options)
        try:
            async with asyncio.timeout(None) as limit:
                with self._abortable({generation.request_id, *_names(context)}, limit):
                    await self._send(generation, context, wants_timings=message.include_timings)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ClientGone("the request was aborted") from error
        record.end(generation.outcome)

    async def _send(self, generation: Generation, context: Context, *, wants_timings: bool) -> None:
        is_first = True
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                message = convert.response(delta, generation, self._gateway.token_bytes, wants_timings=wants_timings)
                if is_first:
                    # Not before: a client's gRPC sends a call that failed again only while it has seen no header of an answer.
                    await context.send_initial_metadata(((REQUEST_ID_KEY, generation.request_id),))
                    message.request_id = generation.request_id
                    is_first = False
                await _write(context, message)

    @contextmanager
    def _abortable(self, names: Set[str], limit: asyncio.Timeout) -> Iterator[None]:
        self._live.update(dict.fromkeys(names, limit))
        try:
            yield
        finally:
            for name in names:
                if self._live.get(name) is limit:
                    del self._live[name]

    def _options(self, context: Context) -> CallOptions:
        remaining_s = context.time_remaining()
        timeout_s = self._gateway.config.request_timeout_s if remaining_s is None else min(remaining_s, MAX_TIMEOUT_S)
        return CallOptions(time.monotonic(), timeout_s)


def _names(context: Context) -> list[str]:
    """What the client calls its request, if it does."""
    return [str(value) for key, value in context.invocation_metadata() or () if key == REQUEST_ID_KEY]


async def _write(context: Context, message: pb.GenerateResponse) -> None:
    try:
        await context.write(message)
    except aio.BaseError as error:  # the connection is lost, and the call's own cancel has not come yet
        raise ClientGone("the client left") from error


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    try:
        async with rpc.answering(context):
            yield
    except aio.BaseError:  # of gRPC's own: the call is over, or was just aborted
        raise
    except Exception as error:
        _LOG.error("bug in the gateway, in a call", exc_info=error)
        await rpc.abort(context, InternalError("internal error of the gateway"))
