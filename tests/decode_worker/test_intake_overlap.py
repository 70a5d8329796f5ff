"""A ticket that is still an offer: read behind the marks, committed when it is complete."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import BatonError, PlaneUnavailable, TicketMismatch, TicketStale, TransferError, Unauthorized, WrongIncarnation
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer.base import Progress
from cluster.types import TokenOutput
from decode_worker.intake import Taken
from tests.decode_worker.fakes import FIRST_TOKEN, LAYOUT, NUM_TOKENS, Bench, Gate, request, ticket

OFFER = ticket(first_token=None)


def begin(bench: Bench, offer: KVTicket = OFFER) -> asyncio.Task[Taken | None]:
    return asyncio.create_task(bench.intake.take(request(), offer))


async def test_blocks_are_read_behind_the_marks_and_the_rest_after_the_last() -> None:
    bench = Bench()
    task = begin(bench)
    seen = []
    for num_ready_tokens in (0, 3, 4, 9):  # of blocks of four
        bench.peer.progress.put_nowait(Progress(num_ready_tokens))
        await asyncio.sleep(0.01)
        seen.append((bench.log.count("read"), bench.peer.indexes))
    assert seen == [(0, []), (0, []), (1, [0]), (2, [1])]
    assert "release" not in bench.log
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, ticket()))
    taken = await task
    assert taken is not None and taken.first_token == FIRST_TOKEN
    assert taken.num_bytes == 3 * LAYOUT.block_bytes
    assert bench.log == ["reserve", "connect", "follow", *["read", "read ended"] * 3, "release"]
    for block_id, ref in zip((5, 3, 4), OFFER.blocks, strict=True):
        assert bench.pool[block_id].equal(bench.peer.pool[ref.block_id])
    assert bench.tails == [(4, 2)]


async def test_marks_that_come_during_a_read_count_as_one() -> None:
    bench = Bench()
    gate = bench.peer.before_read = Gate()
    task = begin(bench)
    bench.peer.progress.put_nowait(Progress(4))
    await gate.reached.wait()
    for progress in (Progress(8), Progress(9), Progress(NUM_TOKENS, ticket())):
        bench.peer.progress.put_nowait(progress)
    await asyncio.sleep(0.01)
    gate.open.set()
    assert await task is not None
    assert bench.log.count("read") == 2 and bench.peer.indexes == [1, 2]


async def test_only_what_is_exposed_counts_as_transfer() -> None:
    """Neither the computing nor the reading behind it, but all from the moment that the ticket was complete."""
    bench = Bench()
    gate = bench.peer.before_read = Gate()
    task = begin(bench)
    bench.peer.progress.put_nowait(Progress(4))
    await gate.reached.wait()
    await asyncio.sleep(0.3)
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, ticket()))
    await asyncio.sleep(0.1)
    gate.open.set()
    taken = await task
    assert taken is not None and 0.1 <= taken.transfer_s < 0.3


async def test_checksums_of_runs_are_checked_against_the_complete_ticket() -> None:
    bench = Bench()
    checksums = bench.checksums()
    task = begin(bench)
    bench.peer.progress.put_nowait(Progress(4))
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, ticket(checksums=checksums)))
    assert await task is not None

    bench = Bench()
    bench.peer.pool[OFFER.blocks[0].block_id, 17] ^= 1
    task = begin(bench)
    bench.peer.progress.put_nowait(Progress(4))
    await asyncio.sleep(0.01)
    assert bench.log.count("read ended") == 1
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, ticket(checksums=checksums)))
    with pytest.raises(TransferError) as caught:
        await task
    assert caught.value.param == "checksums" and "[0]" in caught.value.message
    assert "release" not in bench.log and bench.log[-1] == "abort r/0"


async def test_checksums_that_nobody_expected_are_a_mismatch() -> None:
    bench = Bench(checksums=False)
    task = begin(bench)
    bench.peer.progress.put_nowait(Progress(4))
    await asyncio.sleep(0.01)
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, ticket(checksums=bench.checksums())))
    with pytest.raises(TransferError) as caught:
        await task
    assert "checksums" in caught.value.message and bench.log[-1] == "abort r/0"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "other"),
        ("attempt", 1),
        ("nonce", b"m" * 16),
        ("incarnation", "other"),
        ("endpoint", "elsewhere:1"),
        ("blocks", (BlockRef(2, 1), BlockRef(0, 3), BlockRef(1, 2))),
        ("num_tokens", 9),
        ("layout", KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, block_size=4, kv_dtype="bf16")),
        ("checkpoint", "other"),
        ("domain", "other"),
        ("lease_s", 31.0),
        ("first_token", None),
        ("checksums", (1, 2)),
    ],
)
async def test_a_complete_ticket_that_is_not_the_offers_is_never_committed(field: str, value: Any) -> None:
    bench = Bench()
    task = begin(bench)
    changed: dict[str, Any] = {field: value}
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, ticket(**changed)))
    with pytest.raises(TransferError) as caught:
        await task
    assert isinstance(caught.value.__cause__ or caught.value, TicketMismatch) and field in caught.value.message.replace(" ", "_")
    assert "release" not in bench.log and bench.log[-1] == "abort r/0"


@pytest.mark.parametrize(
    ("news", "seen"),
    [
        (None, TransferError),  # the stream ends
        (TicketStale("withdrawn"), TicketStale),
        (TransferError("lost"), TransferError),
        (PlaneUnavailable("none"), PlaneUnavailable),
        (WrongIncarnation("restarted"), TicketStale),
        (Unauthorized("secret"), TransferError),
    ],
)
@pytest.mark.parametrize("num_marks", [0, 1])
async def test_the_end_of_the_offer_ends_the_intake(num_marks: int, news: BaseException | None, seen: type[BatonError]) -> None:
    bench = Bench()
    task = begin(bench)
    for _ in range(num_marks):
        bench.peer.progress.put_nowait(Progress(4))
    bench.peer.progress.put_nowait(news)
    with pytest.raises(seen):
        await task
    assert bench.log[-1] == "abort r/0" and "release" not in bench.log and len(bench.intake) == 0


@pytest.mark.parametrize("num_marks", [0, 1, 2])
async def test_cancelled_at_any_moment_it_frees_after_the_read_has_ended(num_marks: int) -> None:
    bench = Bench()
    gate = bench.peer.before_read = Gate()
    task = begin(bench)
    for mark in range(num_marks):
        bench.peer.progress.put_nowait(Progress(4 * mark))
    await asyncio.sleep(0.01)
    task.cancel()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.log[-1] == "abort r/0" and len(bench.intake) == 0


async def test_the_lease_is_renewed_while_the_prompt_is_computed() -> None:
    bench = Bench(renew_interval_s=0.01)
    task = begin(bench)
    async with asyncio.timeout(5):
        while bench.log.count("renew") < 2:  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0.01)
    bench.peer.progress.put_nowait(Progress(NUM_TOKENS, replace(OFFER, first_token=TokenOutput(9, -0.25))))
    taken = await task
    assert taken is not None and taken.first_token == TokenOutput(9, -0.25)
