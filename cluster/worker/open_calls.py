"""The calls of a server that have not ended for their callers: a handler may have returned while its last word is still to be sent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc
from grpc import aio

_Context = aio.ServicerContext[Any, Any]


class OpenCalls(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Knows all calls that a server is answering. Use it on the server's event loop. It has no length: gRPC skips what is false."""

    def __init__(self) -> None:
        self._open: set[_Context] = set()
        self._none = asyncio.Event()
        self._none.set()

    async def wait_none(self, timeout_s: float) -> None:
        """Returns when every call has ended, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        coders = {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._followed(handler.unary_stream), **coders)
        return grpc.unary_unary_rpc_method_handler(self._followed(handler.unary_unary), **coders)

    def _followed(self, behavior: Any) -> Any:
        """`behavior` of the same kind: gRPC asks whether it is a generator."""

        async def answer(request: Any, context: _Context) -> Any:
            self._begin(context)
            return await behavior(request, context)

        async def stream(request: Any, context: _Context) -> AsyncGenerator[Any, None]:
            self._begin(context)
            async with aclosing(behavior(request, context)) as messages:
                async for message in messages:
                    yield message

        return stream if inspect.isasyncgenfunction(behavior) else answer

    def _begin(self, context: _Context) -> None:
        self._open.add(context)
        self._none.clear()
        context.add_done_callback(self._end)  # type: ignore[arg-type]  # a nominal class in the stubs

    def _end(self, context: _Context) -> None:
        self._open.discard(context)
        if not self._open:
            self._none.set()
