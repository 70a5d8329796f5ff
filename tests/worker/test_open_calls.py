"""A call is open until its caller has its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from cluster import rpc
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs
from cluster.worker.endpoint import Endpoint

SECRET = "secret"


class _Slow(stubs.KVServicer):
    """Answers when it may: one unary call and both kinds of streams."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.may_end = asyncio.Event()

    async def Renew(self, _request: Any, _context: Any) -> pb.RenewReply:  # noqa: N802
        await self._wait()
        return pb.RenewReply(lease_s=1.0)

    async def Fetch(self, _request: Any, _context: Any) -> AsyncIterator[pb.FetchChunk]:  # noqa: N802
        yield pb.FetchChunk(index=1)
        await self._wait()
        yield pb.FetchChunk(index=2)

    async def Follow(self, _request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802  # as the prefill service: by writing
        await self._wait()
        await context.write(pb.Progress(num_ready_tokens=1))

    async def _wait(self) -> None:
        self.called.set()
        await self.may_end.wait()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Endpoint, _Slow, Any]]:
    service, endpoint = _Slow(), Endpoint("127.0.0.1", SECRET)  # type: ignore[abstract]  # without the calls that nobody makes
    endpoint.add(lambda server: stubs.add_KVServicer_to_server(service, server))
    await endpoint.start()
    async with rpc.channel(endpoint.address) as channel:
        yield endpoint, service, stubs.KVStub(channel)
    await endpoint.close()


async def renew(stub: Any) -> int:
    return int((await stub.Renew(pb.RenewRequest(), metadata=rpc.secret_metadata(SECRET))).lease_s)


async def fetch(stub: Any) -> int:
    return len([chunk async for chunk in stub.Fetch(pb.FetchRequest(), metadata=rpc.secret_metadata(SECRET))])


async def follow(stub: Any) -> int:
    return len([mark async for mark in stub.Follow(pb.FollowRequest(), metadata=rpc.secret_metadata(SECRET))])


@pytest.mark.parametrize(("ask", "expected"), [(renew, 1), (fetch, 2), (follow, 1)])
async def test_an_endpoint_that_closes_lets_calls_end(ask: Any, expected: int) -> None:
    async with serving() as (endpoint, service, stub):
        asking = asyncio.create_task(ask(stub))
        await service.called.wait()
        closing = asyncio.create_task(endpoint.close(grace_s=20))
        await asyncio.sleep(0.1)
        assert not closing.done()
        service.may_end.set()
        assert await asking == expected
        async with asyncio.timeout(10):
            await closing


async def test_but_not_for_ever() -> None:
    async with serving() as (endpoint, service, stub):
        asking = asyncio.create_task(renew(stub))
        await service.called.wait()
        started_s = time.monotonic()
        await endpoint.close(grace_s=0.3)
        assert 0.3 <= time.monotonic() - started_s < 5
        with pytest.raises(aio.AioRpcError):
            await asking


async def test_an_idle_endpoint_closes_at_once() -> None:
    async with serving() as (endpoint, service, stub):
        service.may_end.set()
        assert await renew(stub) == 1
        async with asyncio.timeout(5):
            await endpoint.close(grace_s=20)
