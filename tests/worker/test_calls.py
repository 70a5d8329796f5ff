"""Calls over a real gRPC server: what a caller sees of each way a call can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from cluster import rpc
from cluster.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    InternalError,
    TicketMismatch,
    Unauthorized,
    WorkerRefusal,
    WrongIncarnation,
)
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import DecodeServicer, DecodeStub, add_DecodeServicer_to_server
from cluster.worker.calls import LiveCalls
from cluster.worker.endpoint import Endpoint
from cluster.worker.gate import Gate

SECRET = "s3cret"
Work = Callable[[aio.ServicerContext[Any, Any]], Awaitable[None]]


class Service(DecodeServicer):
    """Runs `work` as every call."""

    def __init__(self) -> None:
        self.gate = Gate("me")
        self.num_ended = 0
        self.calls = LiveCalls(self.gate, self._end)
        self.work: Work = self.write_one
        self.started = asyncio.Event()
        self.one_started = asyncio.Semaphore(0)
        self.unwound = asyncio.Event()

    def _end(self) -> None:
        self.num_ended += 1

    async def Decode(self, message: pb.DecodeRequest, context: aio.ServicerContext[Any, Any]) -> None:  # type: ignore[override]  # noqa: N802
        await self.calls.serve(message.header, message.request.request_id, context, lambda: self.work(context))

    async def write_one(self, context: aio.ServicerContext[Any, Any]) -> None:
        await context.write(pb.DecodeEvent(declined=pb.Declined(reason="busy")))

    async def hang(self, context: aio.ServicerContext[Any, Any]) -> None:
        try:
            await self.write_one(context)
            self.started.set()
            self.one_started.release()
            await asyncio.Event().wait()
        finally:
            self.unwound.set()


@asynccontextmanager
async def serving(secret: str = SECRET) -> AsyncIterator[tuple[Service, Callable[..., Any]]]:
    service = Service()
    endpoint = Endpoint("127.0.0.1", SECRET)
    endpoint.add(lambda server: add_DecodeServicer_to_server(service, server))
    await endpoint.start()
    channel = rpc.channel(endpoint.address)
    stub = DecodeStub(channel)

    def call(request_id: str = "r", incarnation: str = "me", timeout: float | None = 10) -> Any:
        message = pb.DecodeRequest(header=pb.Header(incarnation=incarnation, router_epoch=1), request=pb.Request(request_id=request_id))
        return stub.Decode(message, metadata=rpc.secret_metadata(secret), timeout=timeout)

    try:
        yield service, call
    finally:
        await channel.close(None)
        await endpoint.close()
        await endpoint.close()


async def error_of(stream: Any) -> BatonError:
    with pytest.raises(aio.AioRpcError) as error:
        async for _ in stream:
            pass
    return rpc.error_of(error.value)


async def test_a_call_that_ends_well() -> None:
    async with serving() as (service, call):
        events = [event async for event in call()]
        assert [event.declined.reason for event in events] == ["busy"]
        await asyncio.wait_for(service.calls.wait_idle(), 5)
        assert service.num_ended == 1


async def test_the_gate_and_the_secret_are_asked_first() -> None:
    async with serving() as (service, call):
        assert isinstance(await error_of(call(incarnation="old")), WrongIncarnation)
        service.gate.close()
        assert isinstance(await error_of(call()), Draining)
        assert service.num_ended == 0
    async with serving(secret="wrong") as (_, call):
        assert isinstance(await error_of(call()), Unauthorized)


async def test_a_typed_error_keeps_its_class_and_field() -> None:
    async def fail(_context: Any) -> None:
        raise TicketMismatch("no", param="layout", retry_after_s=0.5)

    async with serving() as (service, call):
        service.work = fail
        error = await error_of(call())
        assert isinstance(error, TicketMismatch)
        assert (error.message, error.param, error.retry_after_s) == ("no", "layout", 0.5)


async def test_a_bug_is_an_internal_error_that_tells_no_secrets() -> None:
    async def fail(_context: Any) -> None:
        raise KeyError("some internals")

    async with serving() as (service, call):
        service.work = fail
        error = await error_of(call())
        assert type(error) is InternalError and "internals" not in error.message


async def test_cancel_unwinds_the_work() -> None:
    async with serving() as (service, call):
        service.work = service.hang
        stream = call()
        await service.started.wait()
        stream.cancel()
        async with asyncio.timeout(5):
            await service.unwound.wait()
            await service.calls.wait_idle()
        assert service.num_ended == 1


async def test_the_callers_deadline_unwinds_the_work() -> None:
    async with serving() as (service, call):
        service.work = service.hang
        assert isinstance(await error_of(call(timeout=0.1)), DeadlineExceeded)
        async with asyncio.timeout(5):
            await service.calls.wait_idle()


async def test_one_attempt_runs_once_at_a_time() -> None:
    async with serving() as (service, call):
        service.work = service.hang
        first = call("a")
        await service.started.wait()
        error = await error_of(call("a"))
        assert type(error) is WorkerRefusal and error.param == "attempt"
        assert len(service.calls) == 1, "the refused one must not have ended the first"
        first.cancel()
        async with asyncio.timeout(5):
            await service.calls.wait_idle()
        service.work = service.write_one
        assert len([event async for event in call("a")]) == 1


async def test_abort_answers_all_with_draining() -> None:
    async with serving() as (service, call):
        service.work = service.hang
        streams = [call(name) for name in "abc"]
        errors = [asyncio.create_task(error_of(stream)) for stream in streams]
        for _ in streams:
            await service.one_started.acquire()
        service.calls.abort()
        async with asyncio.timeout(5):
            await service.calls.wait_idle()
        assert [type(error) for error in await asyncio.gather(*errors)] == [Draining] * 3
        assert service.num_ended == 3


async def test_an_address_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as error:
        Endpoint("203.0.113.7", SECRET)
    assert error.value.param == "host"
