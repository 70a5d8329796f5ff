"""Threads whose calls may not come back, and how long one waits for them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest
import torch

from cluster.errors import TicketStale, TransferError
from cluster.kv_transfer.daemon_thread import DaemonThread
from cluster.kv_transfer.patience import Patience
from cluster.kv_transfer.slices import in_slices
from tests.eventually import eventually


class TestDaemonThread:
    async def test_runs_in_the_order_of_asking_until_it_is_stopped(self) -> None:
        thread, seen = DaemonThread("test-daemon"), list[int]()
        results = [thread.submit(partial(seen.append, number)) for number in range(20)]
        thread.stop()
        thread.stop()
        await asyncio.gather(*results)
        assert seen == list(range(20))
        with pytest.raises(TransferError, match="was stopped"):
            await thread.submit(lambda: 1)
        await eventually(lambda: not any(found.name == "test-daemon" for found in threading.enumerate()))

    async def test_passes_errors_on_and_goes_on(self) -> None:
        thread = DaemonThread("test-daemon")
        with pytest.raises(ZeroDivisionError):
            await thread.submit(lambda: 1 // 0)
        assert await thread.submit(lambda: 2) == 2
        thread.stop()

    async def test_keeps_nothing_of_what_it_has_done(self) -> None:
        thread, tensor = DaemonThread("test-daemon"), torch.zeros(1)
        gone = weakref.ref(tensor)
        await thread.submit(lambda kept=tensor: kept.numel())  # type: ignore[misc]
        del tensor
        gc.collect()
        await eventually(lambda: gone() is None)
        assert not thread.pending
        thread.stop()


class TestPatience:
    async def test_ends(self) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(2):
            with pytest.raises(TransferError, match=r"the peer's answer took longer than 0.1 s"):
                await Patience(0.1).wait(never, "the peer's answer")
        assert not never.done(), "the work goes on by itself"

    async def test_becomes_shorter_while_it_waits(self) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        patience = Patience(60, 0.1)
        waiting = asyncio.create_task(patience.wait(never, "it"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        patience.hurry()
        async with asyncio.timeout(2):
            with pytest.raises(TransferError):
                await waiting

    async def test_is_given_up_with_what_it_belongs_to(self) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(Patience(60).wait(never, "it", ended))
        await asyncio.sleep(0)
        ended.set_result("the peer is gone")
        async with asyncio.timeout(2):
            with pytest.raises(TransferError, match="it was given up: the peer is gone"):
                await waiting


class TestSlices:
    @pytest.mark.parametrize(("num_rows", "slice_rows", "expected"), [(0, 3, []), (3, 3, [3]), (7, 3, [3, 3, 1]), (2, 5, [2])])
    async def test_cover_all_rows_once(self, num_rows: int, slice_rows: int, expected: list[int]) -> None:
        seen: list[range] = []

        async def transfer(part: slice) -> None:
            seen.append(range(num_rows)[part])

        await in_slices(num_rows, slice_rows, transfer)
        assert [len(part) for part in seen] == expected
        assert [row for part in seen for row in part] == list(range(num_rows))

    async def test_the_first_failure_cancels_the_others(self) -> None:
        ended: list[int] = []

        async def transfer(part: slice) -> None:
            if part.start == 1:
                raise TicketStale("over")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(part.start)

        async with asyncio.timeout(5):
            with pytest.raises(TicketStale):
                await in_slices(4, 1, transfer)
        assert sorted(ended) == [0, 2, 3]
