"""Copies in a thread: complete, in slices, and never after the caller was told that they ended."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from cluster.kv_transfer import block_copier
from cluster.kv_transfer.block_copier import BlockCopier
from tests.kv_transfer.owner import random_pool


class Gate:
    """Holds every copy in the thread until it is opened."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self._loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.opened = threading.Event()
        self.num_copies = 0

    def __call__(self, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.opened.wait(10)
        self.num_copies += 1
        self._copy(*arguments)


@pytest.fixture
async def copier() -> AsyncIterator[BlockCopier]:
    copier = BlockCopier()
    yield copier
    copier.close()
    copier.close()


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    gate = Gate(block_copier._copy)
    monkeypatch.setattr(block_copier, "_copy", gate)
    yield gate
    gate.opened.set()


SOURCE = torch.empty(50, 4096, dtype=torch.uint8)
random_pool(SOURCE, seed=0)


@pytest.mark.parametrize("slice_bytes", [1, 4096, 5 * 4096, 2**30])
async def test_slices_cover_everything_once(copier: BlockCopier, monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(block_copier, "_SLICE_BYTES", slice_bytes)
    rows, block_ids = random.Random(1).sample(range(50), 23), random.Random(2).sample(range(60), 23)
    destination = torch.zeros(60, 4096, dtype=torch.uint8)
    await copier.copy(SOURCE, rows, destination, block_ids)
    expected = torch.zeros_like(destination)
    expected[block_ids] = SOURCE[rows]
    assert torch.equal(destination, expected)


async def test_cancelled_copy_ends_only_when_the_thread_has_left(copier: BlockCopier, gate: Gate) -> None:
    destination = torch.zeros(50, 4096, dtype=torch.uint8)
    copying = asyncio.create_task(copier.copy(SOURCE, range(50), destination, range(50)))
    await gate.entered.wait()
    for _ in range(3):  # cancelled again and again
        copying.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not copying.done()
        assert not destination.any()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert torch.equal(destination, SOURCE)  # it wrote before it ended, not after


async def test_cancelled_copy_starts_no_further_slice(copier: BlockCopier, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copier, "_SLICE_BYTES", 4096)
    destination = torch.zeros(50, 4096, dtype=torch.uint8)
    first = asyncio.create_task(copier.copy(SOURCE, range(50), destination, range(50)))
    await gate.entered.wait()
    queued = asyncio.create_task(copier.copy(SOURCE, range(50), destination, range(50)))
    await asyncio.sleep(0)
    first.cancel()
    queued.cancel()
    gate.opened.set()
    await asyncio.wait([first, queued])
    assert first.cancelled()
    assert queued.cancelled()
    assert gate.num_copies == 1


async def test_the_event_loop_runs_meanwhile(copier: BlockCopier, gate: Gate) -> None:
    copying = asyncio.create_task(copier.copy(SOURCE, [1], torch.zeros(1, 4096, dtype=torch.uint8), [0]))
    await gate.entered.wait()  # the loop is here while the thread is there
    assert not copying.done()
    gate.opened.set()
    await copying


async def test_failure_in_the_thread_is_raised(copier: BlockCopier) -> None:
    with pytest.raises(IndexError):
        await copier.copy(SOURCE, [50], torch.zeros(1, 4096, dtype=torch.uint8), [0])
