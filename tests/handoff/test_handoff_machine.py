"""Any order of what can happen to handoffs between two prefill and two decode workers (promises P0, P2, P3), drawn in
`cluster/kv_transfer/__init__.py`.

Real workers, but for time, threads and network (`lives`): a reader stands in the middle of a block, a commit's answer is lost, a lease
ends, a worker dies, while all else goes on.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from cluster import wire
from cluster.worker.worker import Worker
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.handoff.lives import LocalCluster
from tests.handoff.stage import Stage, chosen

# Of one to four blocks of four tokens, some whole; the last three begin alike.
PROMPTS = ((1,), (2, 3, 4), (5, 6, 8, 9), (10, 11, 12, 13, 14), (20, *range(20, 27)), (20, *range(20, 30)), (20, *range(20, 33), 1, 1))


some = st.integers(0, 11)  # one of as many as there are
max_tokens = st.integers(1, 9)


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = LocalCluster().__enter__()
        self.stage = Stage(self.cluster)

    @initialize()
    def start(self) -> None:
        for _ in range(2):
            self.cluster.start_prefill()
        for plane in ("slow", "grpc"):
            self.cluster.start_decode(plane=plane)

    # ---- the gateway ---------------------------------------------------------------------------------------------------

    @rule(prompt=st.sampled_from(PROMPTS), worker=some, max_tokens=max_tokens)
    def submit(self, prompt: tuple[int, ...], worker: int, max_tokens: int) -> None:
        self.stage.submit(prompt, worker, max_tokens)

    @rule(prompt=st.sampled_from(PROMPTS), workers=st.tuples(some, some), max_tokens=max_tokens, turns=st.integers(1, 5))
    def submit_and_decode(self, prompt: tuple[int, ...], workers: tuple[int, int], max_tokens: int, turns: int) -> None:
        """The straight way to a reader: with the complete ticket if it is there by then, else behind the marks."""
        attempt = self.stage.submit(prompt, workers[0], max_tokens)
        for _ in range(turns):
            self.stage.turn(attempt.prefill.life)
        ticket = attempt.ticket or attempt.offer
        if ticket is not None:
            self.stage.turn(self.stage.decode(attempt, ticket, workers[1]).life)

    @rule(attempt=some, worker=some, is_offer=st.booleans())
    def decode(self, attempt: int, worker: int, is_offer: bool) -> None:
        """A first try, a redirect after a decline, or a replay of a ticket that has been taken, has expired or is another life's."""
        found = chosen([one for one in self.stage.attempts.values() if one.tickets], attempt)
        if found is not None:
            self.stage.decode(found, wire.encode(found.tickets[0 if is_offer else -1]), worker)

    @rule(attempt=some)
    def decode_everywhere(self, attempt: int) -> None:
        """With one right, at the same time: as when a gateway takes a slow worker for a dead one."""
        found = chosen([one for one in self.stage.attempts.values() if one.tickets and one.prefill.is_open], attempt)
        if found is not None:
            for worker in range(2):
                self.stage.turn(self.stage.decode(found, wire.encode(found.tickets[-1]), worker).life)

    @rule(attempt=some, other=some, worker=some, kind=st.integers(0, 2))
    def decode_with_a_wrong_ticket(self, attempt: int, other: int, worker: int, kind: int) -> None:
        """As a confused gateway would: with another attempt's right."""
        offered = [one for one in self.stage.attempts.values() if one.tickets]
        ours, theirs = chosen(offered, attempt), chosen(offered, other)
        if ours is None or theirs is None or ours is theirs:
            return
        our_ticket, their_ticket = ours.tickets[-1], theirs.tickets[-1]
        renamed = dataclasses.replace(their_ticket, request_id=our_ticket.request_id, attempt=our_ticket.attempt)
        swapped = dataclasses.replace(our_ticket, blocks=their_ticket.blocks)
        self.stage.decode(ours, wire.encode((their_ticket, renamed, swapped)[kind]), worker)

    @rule(attempt=some, worker=some)
    def retry(self, attempt: int, worker: int) -> None:
        """The next attempt, while the workers of the last one may not yet know that it has ended."""
        latest = {one.request.request_id: one for one in self.stage.attempts.values()}
        found = chosen([one for one in latest.values() if not one.is_over], attempt)
        if found is not None:
            for leg in (found.prefill, *found.decodes):
                leg.cancel()
            request = found.next_attempt()
            if len(request.generated_token_ids) < request.sampling.max_tokens:
                self.stage.prefill(request, worker)

    @rule(leg=some)
    def cancel(self, leg: int) -> None:
        found = chosen([leg for leg in self.stage.legs() if leg.is_open], leg)
        if found is not None:
            found.cancel()
            self.cluster.loop.settle()

    # ---- the workers ---------------------------------------------------------------------------------------------------

    @rule(worker=some)
    def turn_prefill(self, worker: int) -> None:
        self.stage.turn(self.stage.life(PrefillWorker, worker))

    @rule(worker=some)
    def turn_decode(self, worker: int) -> None:
        self.stage.turn(self.stage.life(DecodeWorker, worker))

    @rule(copy=some)
    @precondition(lambda self: self.cluster.copies.pending)
    def copy(self, copy: int) -> None:
        """Half a block."""
        self.cluster.copies.advance(self.cluster.copies.pending[copy % len(self.cluster.copies.pending)])
        self.cluster.loop.settle()

    @rule(most=st.integers(1, 20))
    @precondition(lambda self: self.cluster.copies.pending)
    def copy_on(self, most: int) -> None:
        """A few halves of blocks of one reader."""
        reader = self.cluster.copies.pending[-1].reader
        for _ in range(most):
            for copy in [copy for copy in self.cluster.copies.pending if copy.reader == reader]:
                self.cluster.copies.advance(copy)
            self.cluster.loop.settle()

    @rule(times=st.integers(1, 4))
    def go_on(self, times: int) -> None:
        """Everybody a little further."""
        for _ in range(times):
            self.stage.step_all()

    @rule(worker=some, same_address=st.booleans())
    def restart(self, worker: int, same_address: bool) -> None:
        life = self.stage.life(Worker, worker)
        self.cluster.kill(life)
        address = life.address if same_address else None
        if isinstance(life.worker, PrefillWorker):
            self.cluster.start_prefill(address)
        else:
            self.cluster.start_decode(address, plane=life.plane)

    # ---- time and wires ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 5.1, 5.1, 29.0, 31.0]), late=st.booleans())
    def wait(self, seconds: float, late: bool) -> None:
        if late:
            self.cluster.loop.jump(seconds)
        else:
            self.cluster.loop.advance(seconds)

    @rule(what=st.sampled_from(["KV/", "KV/Release", ""]))
    def hold_messages(self, what: str) -> None:
        self.cluster.wire.held = what

    @rule()
    @precondition(lambda self: self.cluster.wire.held is not None)
    def deliver_messages(self) -> None:
        self.cluster.wire.deliver_all()
        self.cluster.loop.settle()

    @rule(message=some, is_lost=st.booleans())
    @precondition(lambda self: self.cluster.wire.messages)
    def deliver_or_lose(self, message: int, is_lost: bool) -> None:
        found = self.cluster.wire.messages[message % len(self.cluster.wire.messages)]
        if is_lost:
            found.lose()
        else:
            found.deliver()
        self.cluster.loop.settle()

    # ---- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def all_holds(self) -> None:
        self.stage.check()

    # ---- the end -------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.stage.end()
        finally:
            self.cluster.__exit__()


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_more_orders() -> None:
    run_state_machine_as_test(HandoffMachine, settings=settings(max_examples=1500, stateful_step_count=60, deadline=None))
