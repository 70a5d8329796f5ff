"""Streams from workers, by a call that behaves as grpc.aio's."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router.gateway.worker_clients import WorkerStream


class StalledCall:
    """Its read waits until the call is cancelled."""

    def __init__(self) -> None:
        self.received: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.was_read_abandoned = False
        self.is_cancelled = False

    async def read(self) -> str:
        try:
            return await self.received
        except asyncio.CancelledError:
            self.was_read_abandoned = not self.is_cancelled
            raise

    def cancel(self) -> bool:
        self.is_cancelled = True
        asyncio.get_running_loop().call_soon(self.received.cancel)  # as gRPC, which tells of the end a little later
        return True


async def test_a_cancelled_read_ends_the_call_and_waits_for_its_end() -> None:
    """What grpc.aio holds for a read whose awaiter goes away first is never freed."""
    call = StalledCall()
    reading = asyncio.create_task(WorkerStream[str](cast("Any", call)).read())
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert call.is_cancelled
    with pytest.raises(asyncio.CancelledError):
        await call.received
    await asyncio.sleep(0)
    assert not call.was_read_abandoned


async def test_a_call_that_is_cancelled_ends_its_read() -> None:
    call = StalledCall()
    stream = WorkerStream[str](cast("Any", call))
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.01)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
