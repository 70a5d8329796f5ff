"""Whose communicator uses a device."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.kv_transfer.nccl_turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    turns, order = Turns(), list[str]()

    async def use(holder: str) -> None:
        await turns.take(holder)
        order.append(holder)
        await settle()
        turns.give()

    async with asyncio.TaskGroup() as group:
        for holder in "abcab":
            group.create_task(use(holder))
            await asyncio.sleep(0)
    assert "".join(order) == "abcab"


async def test_a_holder_takes_more_turns_while_nobody_waits() -> None:
    turns = Turns()
    await turns.take("a")
    await turns.take("a")
    other = asyncio.create_task(turns.take("b"))
    await settle()
    third = asyncio.create_task(turns.take("a"))
    await settle()
    assert not other.done() and not third.done()
    turns.give()
    await settle()
    assert not other.done(), "it is still a's"
    turns.give()
    await settle()
    assert other.done() and not third.done()
    turns.give()
    await third
    turns.give()


@pytest.mark.parametrize("seed", range(20))
async def test_cancels_at_any_moment_lose_no_turn(seed: int) -> None:
    rng, turns, holders = random.Random(seed), Turns(), set[str]()

    async def use(holder: str) -> None:
        await turns.take(holder)
        try:
            holders.add(holder)
            assert holders == {holder}
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        finally:
            holders.discard(holder)
            turns.give()

    tasks = [asyncio.create_task(use(f"{number}")) for number in range(30)]
    while any(not task.done() for task in tasks):
        await asyncio.sleep(0)
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
    for task in tasks:
        assert task.cancelled() or task.exception() is None
    await asyncio.wait_for(turns.take("the last"), 1)
