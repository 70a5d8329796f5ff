"""Two kinds of workers, a gateway's view of them, and all that must be true of both at any moment and in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from cluster import convert
from cluster.engine.sequence import SequenceStatus
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import DecodeStub, PrefillStub
from cluster.types import OrderKey, Request, SamplingParams
from cluster.worker.worker import Worker
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.handoff.attempts import Attempt
from tests.handoff.lives import TRANSFER, Leg, Life, LocalCluster

RELEASE: Final = "/baton.worker.v1.KV/Release"
T = TypeVar("T")


def chosen(items: Sequence[T], number: int) -> T | None:
    """One of as many as there are; the newest is number 0."""
    return items[-1 - number % len(items)] if items else None


class Stage:
    """Requests of one test, and who was told what of their KV."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.cluster.wire.on_sent = self._release_sent
        self.cluster.wire.on_heard = self._release_heard
        self.cluster.check_decode_row = self._check_row
        self.attempts: dict[str, Attempt] = {}  # by key
        self.takers: dict[bytes, str] = {}  # by nonce: who was told valid
        self.commits: set[tuple[str, str]] = set()  # (decode worker's incarnation, key) of those that heard valid
        self.num_requests = 0

    # ---- what a gateway does -------------------------------------------------------------------------------------------

    def legs(self) -> list[Leg]:
        """All calls that were ever made."""
        return [leg for attempt in self.attempts.values() for leg in (attempt.prefill, *attempt.decodes)]

    def step_all(self) -> bool:
        """One turn of every engine and one step of every copy; False when there was nothing to do."""
        copies = list(self.cluster.copies.pending)
        has_work = bool(copies)
        for life in self.cluster.alive(Worker):
            has_work = self.turn(life) or has_work
        for copy in copies:
            self.cluster.copies.advance(copy)
            self.cluster.loop.settle()
        return has_work

    def life(self, kind: type[Worker], number: int) -> Life:
        """One of those that live."""
        life = chosen(self.cluster.alive(kind), number)
        assert life is not None, "what was killed was started again"
        return life

    def turn(self, life: Life) -> bool:
        """One turn of its engine, and what follows from it at once; False when there was nothing to do."""
        has_work = life.turn()
        self.cluster.loop.settle()
        return has_work

    def submit(self, prompt: tuple[int, ...], worker: int, max_tokens: int) -> Attempt:
        number = self.num_requests
        self.num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0)
        return self.prefill(Request(f"r{number}", 0, prompt, params, OrderKey(float(number), number)), worker)

    def prefill(self, request: Request, worker: int) -> Attempt:
        life = self.life(PrefillWorker, worker)
        message = pb.PrefillRequest(header=_header(life), request=convert.request_to_pb(request))
        leg = self.cluster.open(life, lambda channel: PrefillStub(channel).Prefill, message)
        self.attempts[request.key] = attempt = Attempt(request, leg)
        return attempt

    def decode(self, attempt: Attempt, ticket: bytes, worker: int) -> Leg:
        life = self.life(DecodeWorker, worker)
        message = pb.DecodeRequest(header=_header(life), request=convert.request_to_pb(attempt.request), ticket=ticket)
        leg = self.cluster.open(life, lambda channel: DecodeStub(channel).Decode, message)
        attempt.decodes.append(leg)
        return leg

    # ---- what always holds ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All that must be true at any moment."""
        self.books_are_right()
        self.nothing_went_wrong_unheard()
        self.what_was_said_is_true()
        self.what_may_be_read_is_there()
        self.a_block_that_is_written_waits_for_it()

    def books_are_right(self) -> None:
        for life in self.cluster.alive(Worker):
            life.engine.check_integrity()
            if isinstance(life.worker, PrefillWorker):
                life.worker.outbox.check_integrity()

    def nothing_went_wrong_unheard(self) -> None:
        assert not self.cluster.faults
        assert not self.cluster.loop.faults

    def what_was_said_is_true(self) -> None:
        for attempt in self.attempts.values():
            attempt.check()

    def what_may_be_read_is_there(self) -> None:
        for attempt in self.attempts.values():
            if attempt.prefill.life.is_alive:
                attempt.check_readable()

    def a_block_that_is_written_waits_for_it(self) -> None:
        """Until its copy has ended, whatever became of the call that wanted it."""
        lives = {life.incarnation: life for life in self.cluster.lives}
        for copy in self.cluster.copies.pending:
            engine = lives[copy.reader].engine
            sequence = engine._sequences.get(copy.key)
            held = engine._blocks.refs(copy.key) if sequence is not None else ()
            assert sequence is not None and copy.block in held, f"{copy.block} of {copy.key} is written and is not its own any more"
            assert sequence.status is SequenceStatus.WAITING_FOR_KV, f"{copy.key} is {sequence.status}, and its blocks are written"

    def _release_sent(self, path: str, request: Any, answer: Any) -> None:
        if path == RELEASE:
            try:
                self._check_answer(request, answer.state == pb.LEASE_STATE_VALID)
            except AssertionError as error:
                self.cluster.faults.append(str(error))

    def _check_answer(self, request: pb.ReleaseRequest, is_valid: bool) -> None:
        if not is_valid:
            assert self.takers.get(request.ticket.nonce) != request.taker, "the same taker asked again and got another answer"
            return
        attempt = self.attempts[_key(request.ticket)]
        if request.ticket.nonce not in self.takers:
            ticket = attempt.tickets[-1]
            attempt.check_intact(ticket, len(ticket.blocks))  # until now
        taker = self.takers.setdefault(request.ticket.nonce, request.taker)
        assert taker == request.taker, f"{attempt.request.key} was given to {taker} and to {request.taker}"

    def _release_heard(self, path: str, request: Any, answer: Any) -> None:
        if path == RELEASE and answer.state == pb.LEASE_STATE_VALID:
            self.commits.add((request.taker.split("/")[0], _key(request.ticket)))

    def _check_row(self, incarnation: str, key: str) -> None:
        assert (incarnation, key) in self.commits, f"{incarnation} decodes {key}, and nobody told it that the KV is valid"

    # ---- and in the end ------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Everything arrives, everybody goes on, and time passes: then nothing is left of anything."""
        self.cluster.wire.deliver_all()
        self.cluster.loop.settle()
        self._go_on_to_the_end()
        assert not [leg for attempt in self.attempts.values() for leg in attempt.decodes if leg.is_open], "decode hangs"
        for _ in range(20):  # prompts may wait for the leases of others, which nobody takes
            if not any(leg.is_open for leg in self.legs()):
                break
            self.cluster.loop.advance(TRANSFER.lease_s + 1)
            self._go_on_to_the_end()
        assert not [leg for leg in self.legs() if leg.is_open], "prefill hangs"
        self.books_are_right()
        self.nothing_went_wrong_unheard()
        self.what_was_said_is_true()
        for life in self.cluster.alive(Worker):
            _check_idle(life)
            self.cluster.kill(life)
        assert all(life.ending is not None and life.ending.done() for life in self.cluster.lives), "a worker does not end"
        assert not self.cluster.copies.pending and not asyncio.all_tasks(self.cluster.loop)

    def _go_on_to_the_end(self) -> None:
        for _ in range(1000):
            if not self.step_all():
                return
        raise AssertionError("no end")


def _header(life: Life) -> pb.Header:
    return pb.Header(incarnation=life.incarnation, router_epoch=1)


def _key(name: pb.TicketName) -> str:
    return f"{name.request_id}/{name.attempt}"


def _check_idle(life: Life) -> None:
    worker, load = life.worker, life.engine.load()
    assert (load.num_blocks_owned, load.num_blocks_leased, load.num_blocks_swapped, load.live_keys) == (0, 0, 0, ()), load
    assert len(worker.calls) == worker.engine_loop.num_streams == 0
    if isinstance(worker, PrefillWorker):
        assert len(worker.outbox) == 0
    if isinstance(worker, DecodeWorker):
        assert len(worker.intake) == 0
