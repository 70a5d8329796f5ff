from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from cluster.config import TransferConfig
from cluster.errors import TicketMismatch, TicketStale
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.types import TokenOutput
from prefill_worker.outbox import LeaseEnd, Outbox
from tests.prefill_worker.fake_clock import FakeClock

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=32, kv_dtype="bf16")
CONFIG = TransferConfig(lease_s=30, renew_interval_s=5, max_lease_s=100)


def offer(request_id: str = "r", attempt: int = 0, nonce: bytes = b"n" * 16) -> KVTicket:
    return KVTicket(request_id, attempt, nonce, "inc", "host:1", (BlockRef(3, 1), BlockRef(5, 9)), 40, LAYOUT, "ckpt", "domain", 30.0)


def complete(ticket: KVTicket) -> KVTicket:
    return replace(ticket, first_token=TokenOutput(7, -0.5), checksums=(1, 2))


class Bench:
    """An outbox and everything it told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.freed: list[str] = []
        self.ends: list[LeaseEnd] = []
        self.outbox = Outbox(CONFIG, self.clock, self.freed.append, self.ends.append)

    def lease(self, **fields: Any) -> KVTicket:
        ticket = offer(**fields)
        self.outbox.offer(ticket)
        self.end = self.outbox.complete(complete(ticket))
        return complete(ticket)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.clock.close()


def test_release_is_valid_once_for_its_taker_and_stale_for_another(bench: Bench) -> None:
    ticket = bench.lease()
    assert bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")
    assert bench.end.result() is LeaseEnd.TAKEN
    assert bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")
    assert not bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "b")
    assert bench.freed == [ticket.key]
    assert len(bench.outbox) == 0 and bench.clock.num_timers == 0


def test_taken_blocks_can_no_longer_be_read_or_renewed(bench: Bench) -> None:
    ticket = bench.lease()
    bench.outbox.check(ticket, len(ticket.blocks))
    bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")
    with pytest.raises(TicketStale):
        bench.outbox.check(ticket, len(ticket.blocks))
    assert bench.outbox.renew(ticket.key, ticket.nonce) is None


def test_an_offer_is_not_readable_and_cannot_be_committed(bench: Bench) -> None:
    ticket = offer()
    bench.outbox.offer(ticket)
    for form in (ticket, complete(ticket)):
        with pytest.raises(TicketMismatch) as error:
            bench.outbox.check(form, len(ticket.blocks))
        assert error.value.param == "first_token"
    assert not bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")
    assert bench.outbox.renew(ticket.key, ticket.nonce) == 30
    bench.outbox.complete(complete(ticket))
    assert bench.outbox.release(ticket.key, ticket.nonce, complete(ticket).digest(), "a"), "the early try must not have spoiled the lease"


def test_an_offer_does_not_expire_while_its_prompt_is_computed(bench: Bench) -> None:
    ticket = offer()
    bench.outbox.offer(ticket)
    bench.clock.advance(10_000)
    end = bench.outbox.complete(complete(ticket))
    bench.clock.advance(29.9)
    assert not end.done()


def test_both_forms_of_the_ticket_may_read(bench: Bench) -> None:
    ticket = bench.lease()
    bench.outbox.check(ticket, len(ticket.blocks))
    bench.outbox.check(replace(ticket, first_token=None, checksums=()), len(ticket.blocks))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("incarnation", "other"),
        ("blocks", (BlockRef(3, 1), BlockRef(5, 10))),
        ("num_tokens", 39),
        ("layout", "other"),
        ("checkpoint", "other"),
        ("domain", "other"),
        ("first_token", TokenOutput(8, -0.5)),
        ("checksums", (1, 3)),
        ("endpoint", "host:2"),
        ("lease_s", 31.0),
    ],
)
def test_check_names_the_field_that_differs(bench: Bench, field: str, value: Any) -> None:
    ticket = bench.lease()
    with pytest.raises(TicketMismatch) as error:
        bench.outbox.check(replace(ticket, **{field: value}), len(ticket.blocks))
    assert error.value.param == field


def test_another_nonce_opens_nothing(bench: Bench) -> None:
    ticket = bench.lease()
    other = b"x" * 16
    with pytest.raises(TicketStale):
        bench.outbox.check(replace(ticket, nonce=other), len(ticket.blocks))
    assert not bench.outbox.release(ticket.key, other, ticket.digest(), "a")
    assert bench.outbox.renew(ticket.key, other) is None
    assert bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")


OTHERS: dict[str, Any] = {
    "incarnation": "other",
    "endpoint": "host:2",
    "blocks": (BlockRef(3, 1), BlockRef(5, 8)),
    "num_tokens": 41,
    "layout": "other",
    "checkpoint": "other",
    "domain": "other",
    "lease_s": 31.0,
    "first_token": TokenOutput(8, -0.5),
    "checksums": (1, 3),
}


@pytest.mark.parametrize("field", [field.name for field in fields(KVTicket) if field.name not in ("request_id", "attempt", "nonce")])
def test_a_commit_for_another_ticket_is_refused_and_ends_nothing(bench: Bench, field: str) -> None:
    """On a one-sided plane the owner sees the ticket at the commit alone."""
    ticket = bench.lease()
    other = replace(ticket, **{field: OTHERS[field]})
    with pytest.raises(TicketMismatch):
        bench.outbox.release(ticket.key, ticket.nonce, other.digest(), "a")
    assert bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")


def test_a_lease_expires_stale_first_then_freed(bench: Bench) -> None:
    states: list[bool] = []
    ticket = offer()
    outbox = Outbox(
        CONFIG, bench.clock, lambda key: states.append(outbox.release(key, ticket.nonce, complete(ticket).digest(), "a")), bench.ends.append
    )
    outbox.offer(ticket)
    end = outbox.complete(complete(ticket))
    bench.clock.advance(30)
    assert states == [False], "whoever asked while the blocks were given back must have heard stale"
    assert end.result() is LeaseEnd.EXPIRED


def test_a_late_timer_does_not_lengthen_a_lease(bench: Bench) -> None:
    ticket = bench.lease()
    bench.clock.advance(30, late=True)
    assert not bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")
    assert bench.end.result() is LeaseEnd.EXPIRED
    bench.clock.advance(1)
    assert bench.freed == [ticket.key]


def test_renewal_extends_up_to_the_cap(bench: Bench) -> None:
    ticket = bench.lease()
    for _ in range(14):
        bench.clock.advance(5)
        assert bench.outbox.renew(ticket.key, ticket.nonce) == pytest.approx(30)
    bench.clock.advance(20)
    assert bench.outbox.renew(ticket.key, ticket.nonce) == pytest.approx(10)
    bench.clock.advance(9.9)
    assert not bench.end.done()
    bench.clock.advance(0.2)
    assert bench.end.result() is LeaseEnd.EXPIRED
    assert bench.outbox.renew(ticket.key, ticket.nonce) is None


def test_withdraw_is_idempotent_and_frees_once(bench: Bench) -> None:
    ticket = bench.lease()
    bench.outbox.withdraw(ticket.key)
    bench.outbox.withdraw(ticket.key)
    assert bench.freed == [ticket.key] and bench.ends == [LeaseEnd.WITHDRAWN]
    assert not bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")


def test_completing_a_withdrawn_offer_is_stale(bench: Bench) -> None:
    ticket = offer()
    bench.outbox.offer(ticket)
    bench.outbox.withdraw(ticket.key)
    with pytest.raises(TicketStale):
        bench.outbox.complete(complete(ticket))


def test_the_same_key_may_be_offered_again_and_the_old_ticket_opens_nothing(bench: Bench) -> None:
    old = bench.lease(nonce=b"1" * 16)
    bench.outbox.withdraw(old.key)
    new = bench.lease(nonce=b"2" * 16)
    assert not bench.outbox.release(old.key, old.nonce, old.digest(), "a")
    assert bench.outbox.release(new.key, new.nonce, new.digest(), "a")
    assert bench.outbox.release(new.key, new.nonce, new.digest(), "a")
    assert bench.freed == [old.key, new.key]


def test_memory_of_taken_tickets_is_bounded(bench: Bench) -> None:
    for number in range(5000):
        ticket = bench.lease(attempt=number)
        assert bench.outbox.release(ticket.key, ticket.nonce, ticket.digest(), "a")
    assert not bench.outbox.release("r/0", b"n" * 16, b"", "a"), "forgotten, so stale: never valid twice for different takers"
    assert bench.outbox.release("r/4999", b"n" * 16, ticket.digest(), "a")
