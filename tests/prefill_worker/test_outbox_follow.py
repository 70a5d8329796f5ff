"""An offer is followed while its prompt is computed: marks, then the complete ticket, then no more."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import TicketMismatch, TicketStale
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Progress
from prefill_worker.outbox import LeaseEnd, Outbox
from tests.prefill_worker.test_outbox import CONFIG, complete, offer

OFFER = offer()


def new_outbox() -> Outbox:
    return Outbox(CONFIG, asyncio.get_running_loop(), lambda _key: None, lambda _end: None)


class Reader:
    """Follows, and keeps what it hears."""

    def __init__(self, outbox: Outbox, ticket: KVTicket = OFFER) -> None:
        self.heard: list[Progress] = []
        self.task = asyncio.create_task(self._read(outbox, ticket))

    async def _read(self, outbox: Outbox, ticket: KVTicket) -> None:
        async for progress in outbox.follow(ticket.key, ticket.nonce):
            self.heard.append(progress)
            await asyncio.sleep(0)  # as a message on its way


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_mark_and_then_the_complete_ticket() -> None:
    outbox = new_outbox()
    outbox.offer(OFFER)
    readers = [Reader(outbox), Reader(outbox)]
    for num_tokens in (16, 32):
        await settled()
        outbox.mark(OFFER.key, num_tokens)
    await settled()
    outbox.complete(complete(OFFER))
    for reader in readers:
        await reader.task
        assert reader.heard == [Progress(0), Progress(16), Progress(32), Progress(40, complete(OFFER))]
    outbox.withdraw(OFFER.key)


async def test_of_marks_in_a_row_the_last_is_told() -> None:
    outbox = new_outbox()
    outbox.offer(OFFER)
    reader = Reader(outbox)
    await settled()
    for num_tokens in (8, 16, 24):
        outbox.mark(OFFER.key, num_tokens)
    await settled()
    outbox.complete(complete(OFFER))
    await reader.task
    assert reader.heard == [Progress(0), Progress(24), Progress(40, complete(OFFER))]
    outbox.withdraw(OFFER.key)


async def test_who_comes_late_hears_the_end_alone() -> None:
    outbox = new_outbox()
    outbox.offer(OFFER)
    outbox.mark(OFFER.key, 32)
    outbox.complete(complete(OFFER))
    reader = Reader(outbox)
    await reader.task
    assert reader.heard == [Progress(40, complete(OFFER))]
    outbox.withdraw(OFFER.key)


async def test_the_end_of_the_offer_is_told() -> None:
    outbox = new_outbox()
    outbox.offer(OFFER)
    reader = Reader(outbox)
    await settled()
    outbox.withdraw(OFFER.key)
    with pytest.raises(TicketStale):
        await reader.task
    outbox.mark(OFFER.key, 8)  # of a step that was under way: nobody cares


async def test_another_nonce_follows_nothing_and_another_attempt_is_not_mistaken_for_it() -> None:
    outbox = new_outbox()
    outbox.offer(OFFER)
    with pytest.raises(TicketStale):
        await Reader(outbox, replace(OFFER, nonce=b"x" * 16)).task
    reader = Reader(outbox)
    await settled()
    outbox.withdraw(OFFER.key)
    outbox.offer(replace(OFFER, nonce=b"x" * 16))  # the same key again, before the reader has heard of the end
    with pytest.raises(TicketStale):
        await reader.task
    outbox.withdraw(OFFER.key)


async def test_below_the_mark_the_offer_may_be_read_and_nothing_else() -> None:
    outbox = new_outbox()
    outbox.offer(OFFER)  # two blocks of 32
    outbox.mark(OFFER.key, 39)
    outbox.check(OFFER, 1)
    for ticket, num_blocks, field in (
        (OFFER, 2, "first_token"),
        (complete(OFFER), 1, "first_token"),
        (replace(OFFER, num_tokens=39), 1, "num_tokens"),
    ):
        with pytest.raises(TicketMismatch) as caught:
            outbox.check(ticket, num_blocks)
        assert caught.value.param == field
    assert not outbox.release(OFFER.key, OFFER.nonce, OFFER.digest(), "a"), "what is read so far is not the prompt"
    end = outbox.complete(complete(OFFER))
    outbox.check(OFFER, 2)
    assert outbox.release(OFFER.key, OFFER.nonce, complete(OFFER).digest(), "a")
    assert await end is LeaseEnd.TAKEN
