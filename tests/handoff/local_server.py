"""The server's end of a `LocalWire`: runs real servicers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from tests.handoff.local_wire import LocalWire, failure, unavailable

if TYPE_CHECKING:
    from tests.handoff.local_channel import LocalChannel


class _Aborted(Exception):
    """What a handler ends with when it aborts its call."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        super().__init__(details)
        self.failure = failure(code, details, metadata)


class _Context:
    """What handlers use of a `ServicerContext`."""

    def __init__(self, write: Callable[[Any], Awaitable[None]]) -> None:
        self.write = write

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()) -> None:
        raise _Aborted(code, details, trailing_metadata)


class LocalServer:
    """One life of a worker's server; it takes services as an `aio.Server` does."""

    def __init__(self, wire: LocalWire, address: str) -> None:
        self._wire = wire
        self._address = address
        self._handlers: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.channels: set[LocalChannel] = set()

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """The same methods come as registered ones."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def start(self) -> None:
        self._wire.servers[self._address] = self

    async def stop(self) -> None:
        """Ends its calls at once; their callers lose the connection."""
        if self._wire.servers.get(self._address) is self:
            del self._wire.servers[self._address]
        for channel in self.channels:
            channel.lost.set()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def unary(self, path: str, data: bytes) -> bytes:
        """The answer of a method with one."""
        handler = self._handlers[path]
        request = handler.request_deserializer(data)
        answer = await self._run(handler.unary_unary(request, _Context(self._no_write)))
        self._wire.on_sent(path, request, answer)
        return bytes(handler.response_serializer(answer))

    async def stream(self, path: str, data: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Runs a method that streams; `send` takes its messages."""
        handler = self._handlers[path]

        async def write(message: Any) -> None:
            await send(handler.response_serializer(message))

        await self._run(_drive(handler.unary_stream(handler.request_deserializer(data), _Context(write)), write))

    async def _run(self, work: Awaitable[Any]) -> Any:
        """In a task of the server, which ends with its caller's or with the server."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        try:
            return await asyncio.shield(task)
        except _Aborted as aborted:
            raise aborted.failure from None
        except asyncio.CancelledError:
            if not task.cancelled():
                task.cancel()  # as gRPC does with a handler whose caller has left; the handler unwinds in its own time
                self._wire.spawn(_outlast(task))
                raise
            raise unavailable("the server has ended") from None
        finally:
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _no_write(_message: Any) -> None:
        raise AssertionError("a method with one answer does not write")


async def _drive(running: Any, write: Callable[[Any], Awaitable[None]]) -> None:
    """A streaming handler of either kind."""
    if not inspect.isasyncgen(running):
        await running
        return
    async for message in running:
        await write(message)


async def _outlast(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
