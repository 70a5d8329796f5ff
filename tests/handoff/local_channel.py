"""The caller's end of a `LocalWire`: what real stubs call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio

from tests.handoff.local_server import LocalServer
from tests.handoff.local_wire import LocalWire, failure, unavailable


class LocalChannel:
    """What the generated stubs and our clients use of an `aio.Channel`."""

    def __init__(self, wire: LocalWire, address: str) -> None:
        self._wire = wire
        self._address = address
        self._calls: set[asyncio.Future[Any]] = set()
        self._is_closed = False
        self.lost = asyncio.Event()

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = False) -> Any:
        async def call(request: Any, *, metadata: Any = None, timeout: float | None = None) -> Any:
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._calls.add(answer)
            self._wire.spawn(self._exchange(path, request_serializer(request), answer))
            try:
                async with asyncio.timeout(timeout):
                    reply = response_deserializer(await answer)
            except TimeoutError:
                raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, path) from None
            finally:
                self._calls.discard(answer)
            self._wire.on_heard(path, request, reply)
            return reply

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool = False) -> Any:
        def call(request: Any, *, metadata: Any = None, timeout: float | None = None) -> LocalStream:
            stream = LocalStream(response_deserializer)
            stream.task = self._wire.spawn(self._feed(path, request_serializer(request), stream))
            self._calls.add(stream.task)
            stream.task.add_done_callback(self._calls.discard)
            return stream

        return call

    def stream_stream(self, path: str, *_: Any, **_options: Any) -> Any:
        """For the stubs' sake: no plane that has such calls runs here."""

        def call(*_: Any, **_options: Any) -> Any:
            raise AssertionError(f"{path} is not for this wire")

        return call

    async def wait_for_state_change(self, _state: Any) -> None:
        await self.lost.wait()

    async def close(self, _grace: float | None = None) -> None:
        """Calls in progress are cancelled."""
        self._is_closed = True
        self.lost.set()
        for call in list(self._calls):
            call.cancel()

    def _connected(self) -> LocalServer:
        server = self._wire.servers.get(self._address)
        if server is None or self._is_closed:
            raise unavailable(f"nobody answers at {self._address}")
        server.channels.add(self)
        return server

    async def _exchange(self, path: str, data: bytes, answer: asyncio.Future[bytes]) -> None:
        try:
            await self._wire.travel(path)
            reply = await self._connected().unary(path, data)
            await self._wire.travel(f"answer of {path}")
        except aio.AioRpcError as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(reply)

    async def _feed(self, path: str, data: bytes, stream: LocalStream) -> None:
        async def send(message: bytes) -> None:
            await self._wire.travel(f"message of {path}")
            stream.put(message)

        try:
            await self._wire.travel(path)
            await self._connected().stream(path, data, send)
            await self._wire.travel(f"end of {path}")
        except aio.AioRpcError as error:
            stream.end(error)
        except asyncio.CancelledError as cancelled:
            stream.end(cancelled)
        else:
            stream.end(None)


class LocalStream:
    """The caller's end of a streaming call."""

    def __init__(self, deserialize: Callable[[bytes], Any]) -> None:
        self._deserialize = deserialize
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._failure: BaseException | None = None
        self.task: asyncio.Task[None] | None = None

    def put(self, message: bytes) -> None:
        self._messages.put_nowait(message)

    def end(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._messages.put_nowait(None)

    def cancel(self) -> None:
        """Ends the call here, and its handler."""
        assert self.task is not None
        self.task.cancel()

    async def read(self) -> Any:
        """The next message. A call that was cancelled here raises CancelledError, as grpc.aio's do."""
        message = await self._messages.get()
        if message is not None:
            return self._deserialize(message)
        self._messages.put_nowait(None)  # for whoever asks again
        if self._failure is not None:
            raise self._failure
        return aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not aio.EOF:  # type: ignore[attr-defined]
            yield message
