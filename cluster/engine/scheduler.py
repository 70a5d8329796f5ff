"""Decides what one step computes. There are no prefill and decode modes: `num_computed_tokens` catches up with `token_ids`, after the
prompt by one token a step.

One order everywhere, `Sequence.order` (promise P4):

    1. decode rows         running sequences with one token to compute in a step, first in order first
    2. everyone else       running sequences with prompt left, preempted and waiting ones, merged in order, while the token budget
                           lasts; the first waiting or preempted one without room blocks those after it, so nobody overtakes
    3. no block for a row  the last in order are preempted: their blocks move to host slots, last block first, only as many as are
                           needed. KV is never recomputed (promises P0, P1). A row that still has no block waits in place, as it does
                           when a block would break the rule of `progress.py`

Admission needs blocks for the whole prompt and leaves a reserve while anyone else may still grow. A preempted sequence comes back under
the same condition; the first in order of all displaces others for it, which is why it always gets to its end. Blocks that wait for a
KV transfer or are leased cannot move, but both have deadlines of their own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge

from cluster.engine.block_manager import AllocationPlan, BlockManager, BlockMove
from cluster.engine.progress import Claim, can_all_finish
from cluster.engine.roster import Roster, in_order
from cluster.engine.sequence import ScheduledSequence, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step and the pool."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_reserved_blocks: int


@dataclass(slots=True)
class Step:
    """What to do: the moves of blocks, in order, then the forward pass over `rows`, output tokens first."""

    rows: list[ScheduledSequence] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Chooses from a roster, and moves sequences between its lists as they get and lose blocks."""

    def __init__(self, limits: SchedulerLimits, roster: Roster, blocks: BlockManager) -> None:
        self._limits = limits
        self._roster = roster
        self._blocks = blocks
        self.num_preemptions = 0

    # ---- reservations --------------------------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence) -> AllocationPlan | None:
        """Blocks for a prompt whose KV will be brought, and for the token after it; None when there is no room now."""
        if self._num_seats_left == 0 or any(queued.order < sequence.order for queued in self._roster.queued):
            return None
        num_blocks = min(self._num_blocks_for(sequence.num_prompt_tokens + 1), sequence.max_num_blocks)
        plan = self._plan(sequence, num_blocks, sequence.num_prompt_tokens)
        if not self._has_room(sequence, plan):
            return None
        sequence.block_table = self._blocks.allocate(sequence.key, plan)
        self._roster.place(sequence, SequenceStatus.WAITING_FOR_KV)
        return plan

    # ---- a step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step; its rows are empty when nobody can go on before something is freed or brought."""
        step = Step()
        self._return_first(step)
        budget = self._schedule_decodes(step, self._limits.max_num_batched_tokens)
        for sequence in self._candidates():
            if budget == 0:
                break
            is_running = sequence.status is SequenceStatus.RUNNING or self._enter(sequence, step)
            num_tokens = min(sequence.num_schedulable_tokens, budget)
            if is_running and self._get_blocks(sequence, num_tokens, step):
                step.rows.append(ScheduledSequence(sequence, num_tokens))
                budget -= num_tokens
        step.rows.sort(key=lambda row: row.is_prompt)  # the last token of a prompt was scheduled as a decode row
        return step

    def _schedule_decodes(self, step: Step, budget: int) -> int:
        """Rows of one token; returns what is left of the budget."""
        for sequence in list(self._roster.running):
            if budget == 0:
                break
            is_running = sequence.status is SequenceStatus.RUNNING  # may have been preempted for an earlier one
            if is_running and sequence.num_schedulable_tokens == 1 and self._get_blocks(sequence, 1, step):
                step.rows.append(ScheduledSequence(sequence, 1))
                budget -= 1
        return budget

    def _candidates(self) -> Iterator[Sequence]:
        """Running sequences with prompt left and, until one cannot enter, queued ones, in order."""
        blocked = False
        prefilling = [sequence for sequence in self._roster.running if sequence.num_schedulable_tokens > 1]
        for sequence in list(merge(prefilling, self._roster.queued, key=in_order)):
            if blocked and sequence.status is not SequenceStatus.RUNNING:
                continue
            yield sequence
            blocked = blocked or sequence.status is not SequenceStatus.RUNNING

    # ---- into the running ----------------------------------------------------------------------------------------------

    def _enter(self, sequence: Sequence, step: Step) -> bool:
        """Lets a queued sequence run, if there is room."""
        return self._resume(sequence, step) if sequence.status is SequenceStatus.PREEMPTED else self._admit(sequence, step)

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        if self._num_seats_left == 0:
            return False
        # the last prompt token is always computed: its logits make the first output token
        plan = self._plan(sequence, self._num_blocks_for(sequence.num_prompt_tokens), sequence.num_prompt_tokens - 1)
        if not self._has_room(sequence, plan):
            return False
        sequence.block_table = self._blocks.allocate(sequence.key, plan)
        sequence.num_cached_tokens = sequence.num_computed_tokens = len(plan.hit_block_ids) * self._limits.block_size
        self._roster.place(sequence, SequenceStatus.RUNNING)
        step.admitted.append(sequence)
        return True

    def _resume(self, sequence: Sequence, step: Step) -> bool:
        num_away = self._blocks.num_away(sequence.key)
        if self._num_seats_left == 0 or num_away + self._reserve_beside(sequence) > self._blocks.num_available:
            return False
        step.moves += self._blocks.move_in(sequence.key, num_away)
        self._return(sequence)
        return True

    def _return_first(self, step: Step) -> None:
        """The first in order of all, if it was preempted, comes back at the expense of the others."""
        preempted = self._roster.preempted
        if not preempted:
            return
        first = min([*self._roster.running, *preempted], key=in_order)
        if first.status is SequenceStatus.RUNNING:
            return
        while num_away := self._blocks.num_away(first.key):
            self._make_room(first, num_away, step)  # in turns with moving in, when both places are full
            moves = self._blocks.move_in(first.key, min(num_away, self._blocks.num_available))
            if not moves:
                return
            step.moves += moves
        if self._num_seats_left == 0 and self._roster.running:
            self._preempt(self._roster.running[-1])
        if self._num_seats_left:
            self._return(first)

    def _return(self, sequence: Sequence) -> None:
        self._blocks.resume(sequence.key)
        self._roster.place(sequence, SequenceStatus.RUNNING)

    # ---- blocks --------------------------------------------------------------------------------------------------------

    @property
    def _num_seats_left(self) -> int:
        return max(self._limits.max_num_seqs - self._roster.num_seated, 0)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    def _plan(self, sequence: Sequence, num_blocks: int, num_shareable_tokens: int) -> AllocationPlan:
        keys = sequence.prefix.keys(sequence.token_ids, num_shareable_tokens) if sequence.prefix else []
        return self._blocks.plan(keys, num_blocks)

    def _reserve_beside(self, sequence: Sequence) -> int:
        """Blocks to leave when `sequence` gets its own: none when nobody else can grow into them."""
        others = (other for other in self._roster.holders if other is not sequence)
        return self._limits.num_reserved_blocks if any(other.can_grow for other in others) else 0

    def _has_room(self, sequence: Sequence, plan: AllocationPlan) -> bool:
        """Whether a sequence without blocks may get what `plan` takes."""
        if plan.num_taken + self._reserve_beside(sequence) > self._blocks.num_available:
            return False
        return self._keeps_progress(sequence, plan.hit_block_ids, plan.num_new_blocks)

    def _keeps_progress(self, sequence: Sequence, entries: tuple[int, ...] | list[int], num_new: int) -> bool:
        """Whether all can still finish after `sequence`, which holds `entries`, gets `num_new` blocks more."""
        blocks = self._blocks
        others = [other for other in self._roster.holders if other is not sequence]
        most = max((other.max_num_blocks for other in [*others, sequence]), default=0)
        if blocks.num_live + len(entries) + num_new + most < blocks.num_blocks + blocks.num_host_slots:
            return True
        claims = [(other.order, Claim(other.block_table, other.max_num_blocks)) for other in others]
        bisect.insort(claims, (sequence.order, Claim(entries, sequence.max_num_blocks, num_new)), key=lambda item: item[0])
        return can_all_finish([claim for _, claim in claims], num_blocks=blocks.num_blocks, num_host_slots=blocks.num_host_slots)

    def _get_blocks(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Makes sure that the next `num_tokens` have blocks that are the sequence's own to write."""
        blocks, table, size = self._blocks, sequence.block_table, self._limits.block_size
        first, end = sequence.num_computed_tokens // size, self._num_blocks_for(sequence.num_computed_tokens + num_tokens)
        num_new = max(end - len(table), 0)
        num_copies = blocks.num_shared(sequence.key, first, end)
        if num_new + num_copies:
            if sequence is not self._roster.holders[0] and not self._keeps_progress(sequence, table, num_new + num_copies):
                return False
            if not self._make_room(sequence, num_new + num_copies, step):
                return False
        step.moves += blocks.make_writable(sequence.key, first, end)
        blocks.grow(sequence.key, num_new)
        return True

    def _make_room(self, sequence: Sequence, num_blocks: int, step: Step) -> bool:
        """Moves blocks of sequences after `sequence` out, last in order first, until `num_blocks` are available."""
        for victim in reversed(self._roster.holders):
            missing = num_blocks - self._blocks.num_available
            if missing <= 0 or self._blocks.num_free_slots == 0 or victim.order <= sequence.order:
                break
            if victim.status is SequenceStatus.WAITING_FOR_KV or any(row.sequence is victim for row in step.rows):
                continue
            if victim.status is SequenceStatus.RUNNING:
                self._preempt(victim)
            step.moves += self._blocks.move_out(victim.key, missing, keep=sequence.key)
        return self._blocks.num_available >= num_blocks

    def _preempt(self, victim: Sequence) -> None:
        self._blocks.suspend(victim.key)
        self._roster.place(victim, SequenceStatus.PREEMPTED)
        self.num_preemptions += 1
