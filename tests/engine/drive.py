"""Runs an engine through a plan of requests of all kinds, as the workers would, and checks each outcome against the model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cluster.engine.engine import Engine, Reservation
from cluster.engine.events import EngineEvent, Failed, Token
from cluster.errors import ContextTooLong
from cluster.types import FinishReason, Request, TokenOutput
from tests.engine.fakes import BLOCK_SIZE, digests, generate_alone, next_token, slot_of

Kind = Literal["generate", "prefill", "decode"]
MAX_STEPS = 2_000


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes and when it is aborted (in steps), and which way it takes."""

    request: Request
    step: int
    abort_after: int | None = None
    kind: Kind = "generate"
    delay: int = 0  # of a prefill's release, or of the KV of a decode
    domain: str = "fake"  # of a decode's KV


def write_kv(engine: Engine, reservation: Reservation, prompt: tuple[int, ...]) -> None:
    """What a transfer does: the prompt's KV into the blocks that do not have it; those that do must have the right one."""
    for position, digest in enumerate(digests(prompt)):
        slot = slot_of(engine.kv_cache, reservation.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE)
        if position // BLOCK_SIZE < reservation.num_cached_blocks:
            assert bytes(slot.tolist()) == digest, "a prefix hit is another prefix"
        else:
            slot.copy_(torch.frombuffer(bytearray(digest), dtype=torch.uint8))


class Drive:
    """`events` are those of each key; `aborted` and `refused` the keys that ended early."""

    def __init__(self, engine: Engine, plan: list[Arrival]) -> None:
        self.engine = engine
        self.plan = plan
        self.events: dict[str, list[EngineEvent]] = {arrival.request.key: [] for arrival in plan}
        self.aborted: set[str] = set()
        self.refused: set[str] = set()
        self._pending = list(plan)
        self._transfers: dict[str, tuple[int, Reservation, Request]] = {}  # by key: the step when the KV is there
        self._leases: dict[str, int] = {}  # by key: the step of the release
        self._step = 0

    def run(self) -> None:
        """Until all is over; fails when that takes too long."""
        while self._pending or self.engine.load().live_keys:
            self._arrive()
            self._abort()
            self._end_transfers_and_leases()
            self.engine.check_integrity()
            had_work = self.engine.has_work
            for key, event in self.engine.step():
                assert had_work
                self._take(key, event)
            self.engine.check_integrity()
            self._step += 1
            assert self._step < MAX_STEPS, f"no end: {self.engine.load()}"

    def _arrive(self) -> None:
        due = [arrival for arrival in self._pending if arrival.step <= self._step]
        for arrival in sorted(due, key=lambda arrival: arrival.request.order_key):
            try:
                is_in = self._submit(arrival)
            except ContextTooLong:
                self.refused.add(arrival.request.key)
                is_in = True
            if is_in:
                self._pending.remove(arrival)

    def _submit(self, arrival: Arrival) -> bool:
        request = arrival.request
        if arrival.kind != "decode":
            self.engine.add(request, stop_after_first_token=arrival.kind == "prefill")
            return True
        reservation = self.engine.reserve(request, arrival.domain, request.num_prompt_tokens)
        if reservation is not None:
            self._transfers[request.key] = (self._step + arrival.delay, reservation, request)
        return reservation is not None

    def _abort(self) -> None:
        for arrival in self.plan:
            key = arrival.request.key
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == self._step:
                if arrival in self._pending:
                    self._pending.remove(arrival)
                    self.aborted.add(key)
                elif key in self.engine.load().live_keys:
                    self.aborted.add(key)
                self._transfers.pop(key, None)
                self._leases.pop(key, None)
                self.engine.abort(key)
                assert key not in self.engine.load().live_keys
                self.engine.abort(key)

    def _end_transfers_and_leases(self) -> None:
        for key, (step, reservation, request) in list(self._transfers.items()):
            if step <= self._step:
                del self._transfers[key]
                write_kv(self.engine, reservation, request.prompt_token_ids)
                self.engine.start(key, TokenOutput(next_token(request.prompt_token_ids)))
        for key, step in list(self._leases.items()):
            if step <= self._step:
                del self._leases[key]
                self.engine.release_lease(key)
                self.engine.release_lease(key)

    def _take(self, key: str, event: EngineEvent) -> None:
        assert not isinstance(event, Failed), event.message
        self.events[key].append(event)
        arrival = next(arrival for arrival in self.plan if arrival.request.key == key)
        if arrival.kind == "prefill" and isinstance(event, Token) and event.finish_reason is None:
            self._leases[key] = self._step + arrival.delay

    def check_outputs(self, max_model_len: int) -> None:
        """Everyone made the tokens it makes alone, or the beginning of them if it was aborted."""
        for arrival in self.plan:
            expected, expected_reason = generate_alone(arrival.request, max_model_len)
            outputs = [event for event in self.events[arrival.request.key] if isinstance(event, Token)]
            made: list[int] = [event.output.token_id for event in outputs]
            reason: FinishReason | None = outputs[-1].finish_reason if outputs else None
            if arrival.kind == "decode":
                expected = expected[1:]  # the first token came with the KV
            elif arrival.kind == "prefill" and len(expected) > 1:
                expected, expected_reason = expected[:1], None  # type: ignore[assignment]
            if arrival.request.key in self.aborted | self.refused:
                assert made == expected[: len(made)]
            else:
                assert (made, reason) == (expected, expected_reason)

    def check_idle(self) -> None:
        """Nothing is left behind."""
        load = self.engine.load()
        assert load.num_blocks_owned == load.num_blocks_leased == load.num_blocks_swapped == 0
        assert load.num_blocks_free + load.num_blocks_cached == load.num_blocks
        assert not load.live_keys and not self.engine.has_work
        assert load.num_seqs_running == load.num_seqs_waiting == load.num_seqs_waiting_for_kv == load.num_tokens_waiting == 0


def run(engine: Engine) -> list[tuple[str, EngineEvent]]:
    """Until there is no work; all events."""
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    return events


def reserve_and_start(engine: Engine, request: Request, domain: str = "fake") -> None:
    """A decode whose KV came at once."""
    reservation = engine.reserve(request, domain, request.num_prompt_tokens)
    assert reservation is not None
    write_kv(engine, reservation, request.prompt_token_ids)
    engine.start(request.key, TokenOutput(next_token(request.prompt_token_ids)))


def num_held(engine: Engine) -> int:
    """Blocks that somebody has."""
    load = engine.load()
    return load.num_blocks_owned + load.num_blocks_leased + load.num_blocks_swapped
