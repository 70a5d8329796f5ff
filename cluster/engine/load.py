"""What an engine holds at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine.block_manager import BlockManager
from cluster.engine.roster import Roster
from cluster.engine.sequence import SequenceStatus


@dataclass(slots=True)
class StepTotals:
    """Counted since the engine was made."""

    num_steps: int = 0
    num_tokens: int = 0  # whose KV was computed


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot between two steps. The first four block counts add up to `num_blocks`."""

    num_blocks: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_owned: int
    num_blocks_leased: int
    num_blocks_swapped: int  # host slots in use
    num_seqs_waiting: int  # in the queue, preempted ones too
    num_seqs_waiting_for_kv: int
    num_seqs_running: int
    num_tokens_waiting: int  # prompt tokens not yet computed
    live_keys: tuple[str, ...]  # of sequences and leases
    num_steps: int
    num_tokens_total: int
    num_preemptions: int


def measure(roster: Roster, blocks: BlockManager, totals: StepTotals, num_preemptions: int) -> EngineLoad:
    """The load of the engine that these belong to."""
    counts = blocks.counts()
    sequences = roster.sequences
    return EngineLoad(
        num_blocks=blocks.num_blocks,
        num_blocks_free=counts.num_free,
        num_blocks_cached=counts.num_cached,
        num_blocks_owned=counts.num_owned,
        num_blocks_leased=counts.num_leased,
        num_blocks_swapped=counts.num_away,
        num_seqs_waiting=len(roster.queued),
        num_seqs_waiting_for_kv=len(roster.waiting_for_kv),
        num_seqs_running=len(roster.running),
        num_tokens_waiting=sum(
            max(sequence.num_prompt_tokens - sequence.num_computed_tokens, 0)
            for sequence in sequences
            if sequence.status is not SequenceStatus.WAITING_FOR_KV
        ),
        live_keys=(*(sequence.key for sequence in sequences), *blocks.leased_keys),
        num_steps=totals.num_steps,
        num_tokens_total=totals.num_tokens,
        num_preemptions=num_preemptions,
    )
