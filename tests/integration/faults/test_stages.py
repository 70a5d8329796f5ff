"""A client that leaves in one stage of its request: that stage ends at once and frees what it held."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.faults.asking import Asking
from tests.integration.faults.clients import Way, connected
from tests.integration.faults.questions import Question, prose
from tests.integration.served import Served

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

REACH_S = 30.0
FREE_S = 20.0  # about one on a machine with nothing else to do; shorter than a lease, after which KV is free anyway

Books = dict[str, Any]


def num_queued(books: Books) -> int:
    return int(books["queue"]["num_requests"])


def blocks(role: str, state: str) -> Callable[[Books], int]:
    return lambda books: int(books["pools"][role]["kv_blocks"][state])


def num_placed(books: Books) -> int:
    return sum(books["live_placements"].values())


async def until(served: Served, wanted: Callable[[Books], bool], limit_s: float) -> float:
    """Seconds until the books are as wanted."""
    started_s = time.monotonic()
    while not wanted(books := await served.books()):
        assert time.monotonic() - started_s < limit_s, books
        await asyncio.sleep(0.02)
    return time.monotonic() - started_s


async def leave(served: Served, request: asyncio.Task[None], held: Callable[[Books], int], stage: str, num_others: int = 0) -> None:
    """Waits until the request holds something, leaves, and waits until that is free and the request is out of the books."""
    await until(served, lambda books: held(books) > 0, REACH_S)
    assert not request.done()
    request.cancel()
    freed_s = await until(served, lambda books: held(books) == 0 and num_placed(books) == num_others, FREE_S)
    print(f"left {stage}: free after {freed_s:.2f} s")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def num_refused(served: Served) -> float:
    """Requests that left the queue because no worker could take them."""
    return await served.counted("baton_router_rejections_total", reason="no_capacity")


@pytest.fixture(params=list(Way), ids=lambda way: way.value)
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


async def test_in_the_queue(served: Served, way: Way) -> None:
    """A long prompt takes the prefill worker's whole budget, and the worker is stopped, so the next one waits; the first goes on to its
    end afterwards."""
    [prefill] = served.pids("Prefill")
    refused = await num_refused(served)
    long = Asking(Question(prose(random.Random(), 12_000), max_tokens=2), Way.WHOLE)
    async with connected(served) as clients:
        with stopped(prefill):
            ahead = asyncio.create_task(long.run(clients))
            await until(served, lambda books: num_placed(books) == 1, REACH_S)
            waiting = asyncio.create_task(Asking(Question("Once upon a time", max_tokens=8), way).run(clients))
            await leave(served, waiting, num_queued, "the queue", num_others=1)
        await ahead
    assert long.answer is not None, long.failure
    assert await num_refused(served) == refused, "it was the client that ended the waiting"


async def test_in_prefill(served: Served, way: Way) -> None:
    async with connected(served) as clients:
        asking = Asking(Question(prose(random.Random(), 12_000), max_tokens=8), way)
        await leave(served, asyncio.create_task(asking.run(clients)), blocks("prefill", "owned"), "prefill")


async def test_between_prefill_and_decode(served: Served, way: Way) -> None:
    """The decode worker is stopped, so the KV waits under its lease."""
    [decode] = served.pids("Decode")
    async with connected(served) as clients:
        asking = Asking(Question(prose(random.Random(), 600), max_tokens=8), way)
        with stopped(decode):
            await leave(served, asyncio.create_task(asking.run(clients)), blocks("prefill", "leased"), "between prefill and decode")
    assert asking.num_pieces <= 1, "the first token is prefill's"


async def test_in_decode(served: Served, way: Way) -> None:
    async with connected(served) as clients:
        asking = Asking(Question("Once upon a time", max_tokens=7000, ignore_eos=True), way)
        await leave(served, asyncio.create_task(asking.run(clients)), blocks("decode", "owned"), "decode")
