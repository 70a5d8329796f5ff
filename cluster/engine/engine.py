"""One engine: requests in, steps, events out. It knows no roles; a prefill worker stops sequences at their first token, a decode
worker brings their KV from elsewhere.

    add ───────────────────────────► queued ─► running ─┬─► finished: blocks free
    reserve ─► waiting for KV ─► start ───────────┘     └─► first token of a prefill: blocks leased ─► release_lease

Not thread safe: one thread calls everything but `disown` (`loop.EngineLoop` does).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from cluster.engine.block_manager import BlockManager
from cluster.engine.events import Allocated, Computed, EngineEvent, Failed, Token
from cluster.engine.interrupt import Audience, Interrupt, StepInterrupted
from cluster.engine.kv_cache import KVCache
from cluster.engine.load import EngineLoad, StepTotals, measure
from cluster.engine.roster import Roster
from cluster.engine.scheduler import Scheduler, SchedulerLimits
from cluster.engine.sequence import ScheduledSequence, Sequence, SequenceStatus
from cluster.engine.sequence_factory import EngineIdentity, SequenceFactory
from cluster.engine.swap_space import SwapSpace
from cluster.errors import ClientGone, InternalError, InvalidRequest
from cluster.kv_layout import KVLayout
from cluster.types import Request, TokenOutput

_LOG = logging.getLogger(__name__)
Events = list[tuple[str, EngineEvent]]  # by `Request.key`
MAX_FAILED_STEPS = 3  # in a row: then the fault is not in the requests


class StepRunner(Protocol):
    """What an engine needs of `runner.ModelRunner`."""

    @property
    def interrupt(self) -> Interrupt:
        """Set on another thread, it makes `run` raise StepInterrupted."""

    def run(self, scheduled: Seq[ScheduledSequence]) -> list[TokenOutput | None]:
        """Computes the rows' KV; a token for each row that reaches its sequence's last known token, else None."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that wait for the KV of a prompt. The first `num_cached_blocks` have it already and must not be written."""

    key: str
    block_ids: tuple[int, ...]  # of the prompt, in order
    num_cached_blocks: int


class Engine:
    """Sequences, their blocks, and the steps that advance them."""

    def __init__(
        self,
        identity: EngineIdentity,
        limits: SchedulerLimits,
        layout: KVLayout,
        kv_cache: KVCache,
        runner: StepRunner,
        *,
        num_swap_slots: int,
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.layout = layout
        self.kv_cache = kv_cache
        self.num_blocks: int = kv_cache.storage.shape[0]
        self._runner = runner
        self._audience = Audience(runner.interrupt)
        self._swap_space = SwapSpace(kv_cache, num_swap_slots)
        self._blocks = BlockManager(self.num_blocks, num_swap_slots)
        self._roster = Roster()
        self._scheduler = Scheduler(limits, self._roster, self._blocks)
        self._factory = SequenceFactory(identity, layout, self.num_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._is_stuck = False  # the last step could do nothing; only a command changes that
        self._num_failed_in_a_row = 0
        self._totals = StepTotals()

    # ---- who it is -----------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> str:
        """Fingerprint of the weights' files and the model's config."""
        return self.identity.checkpoint

    @property
    def domain(self) -> str:
        """Numerics domain of the KV it computes."""
        return self.identity.domain

    @property
    def max_model_len(self) -> int:
        return self.identity.max_model_len

    # ---- commands ------------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, stop_after_first_token: bool) -> None:
        """Queues a request whose prompt is computed here.

        With `stop_after_first_token` its blocks become a lease under `request.key` when the first token is sampled, unless that token
        ends it.

        Raises:
            InvalidRequest: the key is in use, or a token id is out of the vocabulary.
            ContextTooLong: the sequence could never be held.
        """
        self._check_key(request.key)
        sequence = self._factory.make(request, domain=self.domain, stops_at_first_token=stop_after_first_token)
        self._sequences[request.key] = sequence
        self._roster.place(sequence, SequenceStatus.WAITING)
        self._is_stuck = False

    def reserve(self, request: Request, ticket_domain: str, num_tokens: int) -> Reservation | None:
        """Blocks for a prompt whose KV another worker computed in `ticket_domain`; None when there is no room now.

        They are the caller's to write until `start`. Who aborts earlier must have ended all writes.

        Raises:
            InvalidRequest: as `add`, or `num_tokens` is not the prompt's length.
            ContextTooLong: as `add`.
        """
        if num_tokens != request.num_prompt_tokens:
            raise InvalidRequest(f"the KV is of {num_tokens} tokens, the prompt has {request.num_prompt_tokens}", param="num_tokens")
        self._check_key(request.key)
        sequence = self._factory.make(request, domain=ticket_domain, stops_at_first_token=False)
        plan = self._scheduler.reserve(sequence)
        if plan is None:
            return None
        self._sequences[request.key] = sequence
        self._is_stuck = False
        num_prompt_blocks = self.layout.num_blocks_for(num_tokens)
        return Reservation(request.key, tuple(sequence.block_table[:num_prompt_blocks]), len(plan.hit_block_ids))

    def start(self, key: str, first_token: TokenOutput) -> None:
        """The prompt's KV is in the reserved blocks and `first_token` follows it: decoding goes on from there, by way of what an earlier
        attempt has generated.

        Raises:
            ClientGone: nothing is reserved under `key` (any more).
            InvalidRequest: as `SequenceFactory.check_first_token`. The reservation is freed.
        """
        sequence = self._sequences.get(key)
        if sequence is None or sequence.status is not SequenceStatus.WAITING_FOR_KV:
            raise ClientGone(f"{key}: no sequence waits for its KV")
        try:
            self._factory.check_first_token(sequence, first_token.token_id)
        except InvalidRequest:
            self._finish(sequence)
            raise
        self._mark_computed(sequence, sequence.num_prompt_tokens)
        if not sequence.num_output_tokens:
            sequence.token_ids.append(first_token.token_id)
        self._roster.place(sequence, SequenceStatus.RUNNING)
        self._is_stuck = False

    def abort(self, key: str) -> None:
        """Ends a sequence in any state, or its lease, and frees what it holds. Nothing happens when there is none."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._finish(sequence)
        self.release_lease(key)

    def disown(self, key: str) -> None:
        """Nobody waits for this sequence any more: a step that is mostly for such ends early. It ends no sequence. Any thread."""
        self._audience.leave(key)

    def release_lease(self, key: str) -> None:
        """Frees leased blocks. Nothing happens when there is no such lease."""
        self._blocks.release(key)
        self._is_stuck = False

    def _check_key(self, key: str) -> None:
        if key in self._sequences or self._blocks.holds(key):
            raise InvalidRequest(f"{key} is in use", param="request_id")

    # ---- stepping ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do something. False too while all sequences wait for blocks that only a command frees."""
        return not self._is_stuck and bool(self._roster.running or self._roster.queued)

    def step(self, announce: Callable[[Events], None] | None = None) -> Events:
        """Schedules, runs, and updates; what happened, by `Request.key`.

        When the model raises, the step's sequences end with `Failed` and the others go on. A step that was interrupted changes nothing.

        Args:
            announce: hears of allocations before the model runs, so that whoever will read the blocks prepares meanwhile. They are not
                among what is returned then.

        Raises:
            InternalError: steps keep failing, whoever is in them: the engine is broken.
        """
        started_s = time.monotonic()
        step = self._scheduler.schedule()
        self._is_stuck = not step.rows
        self._swap_space.apply(step.moves)
        events = [(sequence.key, self._allocated(sequence, started_s)) for sequence in step.admitted]
        if announce is not None:
            announce(events)
            events = []
        if not step.rows:
            return events
        try:
            with self._audience.watching(step.rows):
                outputs = self._runner.run(step.rows)
        except StepInterrupted:
            return events
        except Exception as error:
            return events + self._fail(step.rows, error)
        self._num_failed_in_a_row = 0
        self._totals.num_steps += 1
        for row, output in zip(step.rows, outputs, strict=True):
            events += [(row.sequence.key, event) for event in self._advance(row, output, started_s)]
        return events

    def _allocated(self, sequence: Sequence, at_s: float) -> EngineEvent:
        return Allocated(self._blocks.refs(sequence.key), sequence.num_cached_tokens, at_s)

    def _advance(self, row: ScheduledSequence, output: TokenOutput | None, started_s: float) -> list[EngineEvent]:
        sequence = row.sequence
        events: list[EngineEvent] = []
        was_prompt = sequence.num_computed_tokens < sequence.num_prompt_tokens
        self._mark_computed(sequence, sequence.num_computed_tokens + row.num_scheduled_tokens)
        self._totals.num_tokens += row.num_scheduled_tokens
        if was_prompt:
            events.append(Computed(sequence.num_computed_tokens))
        if output is not None:
            reason = sequence.finish_reason_for(output.token_id, self.identity.eos_token_ids)
            sequence.token_ids.append(output.token_id)
            events.append(Token(output, reason, started_s))
            if reason is not None:
                self._finish(sequence)
            elif sequence.stops_at_first_token:
                self._lease(sequence)
        return events

    def _mark_computed(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Counts tokens as computed, and lets others find the blocks that became full."""
        first = sequence.num_computed_tokens // self.layout.block_size
        sequence.num_computed_tokens = num_computed_tokens
        num_shareable = num_computed_tokens if self.identity.shares_generated else min(num_computed_tokens, sequence.num_prompt_tokens)
        if sequence.prefix is not None and num_shareable // self.layout.block_size > first:
            keys = sequence.prefix.keys(sequence.token_ids, num_shareable)
            self._blocks.register(sequence.key, first, keys[first:])

    def _lease(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self._blocks.lease(sequence.key)

    def _finish(self, sequence: Sequence) -> None:
        self._forget(sequence)
        self._blocks.free(sequence.key)

    def _forget(self, sequence: Sequence) -> None:
        self._roster.remove(sequence)
        del self._sequences[sequence.key]
        sequence.status = SequenceStatus.FINISHED
        self._is_stuck = False

    def _fail(self, rows: list[ScheduledSequence], error: Exception) -> Events:
        """The step wrote to blocks of its own rows only, so all others are whole."""
        _LOG.error("a step of %d sequences failed", len(rows), exc_info=error)
        for row in rows:
            self._finish(row.sequence)
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            raise InternalError(f"{self._num_failed_in_a_row} steps in a row failed, the last with {error!r}") from error
        return [(row.sequence.key, Failed(f"the step failed: {error!r}")) for row in rows]

    # ---- what it holds -------------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """What the engine holds now."""
        return measure(self._roster, self._blocks, self._totals, self._scheduler.num_preemptions)

    def forget_cached_blocks(self) -> int:
        """Empties the prefix cache; how many blocks it held."""
        return self._blocks.forget_cached()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books balance: blocks, sequences and their statuses."""
        self._blocks.check_integrity()
        self._roster.check_integrity()
        sequences = self._roster.sequences
        assert {sequence.key: sequence for sequence in sequences} == self._sequences, "the roster's sequences are not the engine's"
        assert self._blocks.table_keys == {sequence.key for sequence in self._roster.holders}, "tables and holders of blocks differ"
        for sequence in sequences:
            num_needed = self.layout.num_blocks_for(sequence.num_computed_tokens)
            assert num_needed <= len(sequence.block_table) <= sequence.max_num_blocks, f"{sequence} has a wrong number of blocks"
