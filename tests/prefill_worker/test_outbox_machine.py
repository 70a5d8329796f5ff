"""Any order of offers, renewals, commits, withdrawals and time: valid for one taker at most, blocks freed exactly once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from cluster.errors import TransferError
from cluster.kv_ticket import KVTicket
from cluster.types import TokenOutput
from prefill_worker.outbox import LeaseEnd, Outbox
from tests.prefill_worker.fake_clock import FakeClock
from tests.prefill_worker.test_outbox import CONFIG, LAYOUT, offer


def computed(ticket: KVTicket) -> KVTicket:
    return replace(ticket, first_token=TokenOutput(1))


class OutboxMachine(RuleBasedStateMachine):
    tickets = Bundle("tickets")
    takers = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.freed: list[str] = []
        self.ends: list[LeaseEnd] = []
        self.outbox = Outbox(CONFIG, self.clock, self.freed.append, self.ends.append)
        self.living: dict[str, KVTicket] = {}  # the model: offers that nobody has seen end
        self.deadline_s: dict[str, float] = {}  # of the readable ones
        self.cap_s: dict[str, float] = {}
        self.num_ready: dict[bytes, int] = {}  # tokens, by nonce
        self.taken_by: dict[bytes, str] = {}
        self.num_offers = 0

    def teardown(self) -> None:
        self.clock.close()

    def settle(self) -> None:
        """Ends in the model what time has ended."""
        for key in [key for key, deadline_s in self.deadline_s.items() if self.clock.now_s >= deadline_s]:
            self.end(key)

    def end(self, key: str) -> None:
        self.living.pop(key, None)
        self.deadline_s.pop(key, None)

    @rule(target=tickets, attempt=st.integers(0, 2))
    def offer(self, attempt: int) -> KVTicket:
        self.settle()
        ticket = offer(attempt=attempt, nonce=self.num_offers.to_bytes(16, "big"))
        if ticket.key not in self.living:
            self.outbox.withdraw(ticket.key)  # as the service does when a stream ends; a late timer may not have fired
            self.outbox.offer(ticket)
            self.living[ticket.key] = ticket
            self.num_offers += 1
        return self.living[ticket.key]

    @rule(ticket=tickets, num_tokens=st.integers(0, 40))
    def mark(self, ticket: KVTicket, num_tokens: int) -> None:
        self.settle()
        if self.living.get(ticket.key) == ticket and ticket.key not in self.deadline_s:
            self.outbox.mark(ticket.key, num_tokens)
            self.num_ready[ticket.nonce] = num_tokens

    @rule(ticket=tickets)
    def complete(self, ticket: KVTicket) -> None:
        self.settle()
        if self.living.get(ticket.key) == ticket and ticket.key not in self.deadline_s:
            self.outbox.complete(computed(ticket))
            self.deadline_s[ticket.key] = self.clock.now_s + CONFIG.lease_s
            self.cap_s[ticket.key] = self.clock.now_s + CONFIG.max_lease_s

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 31.0]), late=st.booleans())
    def wait(self, seconds: float, late: bool) -> None:
        self.clock.advance(seconds, late=late)

    @rule(ticket=tickets)
    def renew(self, ticket: KVTicket) -> None:
        self.settle()
        left_s = self.outbox.renew(ticket.key, ticket.nonce)
        assert (left_s is not None) == (self.living.get(ticket.key) == ticket)
        if left_s is not None and ticket.key in self.deadline_s:
            self.deadline_s[ticket.key] = min(self.clock.now_s + CONFIG.lease_s, self.cap_s[ticket.key])

    @rule(ticket=tickets, num_blocks=st.integers(0, 2))
    def read(self, ticket: KVTicket, num_blocks: int) -> None:
        self.settle()
        is_computed = ticket.key in self.deadline_s or self.num_ready.get(ticket.nonce, 0) >= num_blocks * LAYOUT.block_size
        readable = self.living.get(ticket.key) == ticket and is_computed
        try:
            self.outbox.check(ticket, num_blocks)
        except TransferError:
            assert not readable
        else:
            assert readable

    @rule(ticket=tickets, taker=takers)
    def release(self, ticket: KVTicket, taker: str) -> None:
        self.settle()
        may_take = self.living.get(ticket.key) == ticket and ticket.key in self.deadline_s
        valid = self.outbox.release(ticket.key, ticket.nonce, computed(ticket).digest(), taker)
        assert valid == (may_take or self.taken_by.get(ticket.nonce) == taker)
        if may_take:
            self.taken_by[ticket.nonce] = taker
            self.end(ticket.key)

    @rule(ticket=tickets)
    def withdraw(self, ticket: KVTicket) -> None:
        self.settle()
        self.outbox.withdraw(ticket.key)
        self.end(ticket.key)

    @invariant()
    def every_offer_is_freed_once(self) -> None:
        assert len(self.freed) == len(self.ends) == self.num_offers - len(self.outbox)
        assert len(self.outbox) >= sum(1 for key in self.living if key not in self.deadline_s)
        assert self.clock.num_timers <= len(self.outbox)


TestOutboxMachine = OutboxMachine.TestCase
TestOutboxMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
