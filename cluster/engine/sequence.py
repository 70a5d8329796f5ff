"""A request inside an engine.

WAITING ──admitted: blocks for the whole prompt──► RUNNING ◄──first token given──── WAITING_FOR_KV
                                                   │   ▲                            (blocks are filled by a KV transfer)
                           blocks needed elsewhere │   │ blocks back
                                                   ▼   │
                                                 PREEMPTED          any ──finish, abort, failure──► FINISHED
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from cluster.engine.prefix_chain import PrefixChain
from cluster.types import FinishReason, OrderKey, Request


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    WAITING_FOR_KV = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Sequence:
    """The tokens of one request and how far their KV is computed.

    `block_table[i]` is the block of tokens `[i * block_size, (i + 1) * block_size)`. It is the block manager's own list: the manager
    alone changes it. While the sequence is PREEMPTED it may name host slots (ids from `num_blocks` on).
    """

    def __init__(
        self, request: Request, *, max_num_tokens: int, max_num_blocks: int, stops_at_first_token: bool, prefix: PrefixChain | None
    ) -> None:
        """
        Args:
            request: what to generate.
            max_num_tokens: prompt and output together never get longer.
            max_num_blocks: the most blocks it will ever hold here.
            stops_at_first_token: its blocks become a lease once the first token is sampled.
            prefix: the keys of its full blocks; None shares nothing.
        """
        self.request = request
        self.key = request.key
        self.token_ids: list[int] = list(request.prompt_token_ids)
        if not stops_at_first_token:
            self.token_ids += request.generated_token_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.status = SequenceStatus.WAITING
        self.stops_at_first_token = stops_at_first_token
        self.max_num_tokens = max_num_tokens
        self.max_num_blocks = max_num_blocks
        self.prefix = prefix
        self.order: tuple[OrderKey, str] = (request.order_key, request.key)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens without KV. One when decoding, more when what an earlier attempt generated is replayed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Of them, those that one step may compute: what is left of the prompt, or one token after it, replayed ones too (promise P0)."""
        return max(self.num_prompt_tokens - self.num_computed_tokens, 1)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def can_grow(self) -> bool:
        """Whether it may still ask for a block."""
        return len(self.block_table) < self.max_num_blocks

    def finish_reason_for(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends if `token_id` comes next; None if it goes on."""
        sampling = self.request.sampling
        num_output = self.num_output_tokens + 1
        is_stop = token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)
        if is_stop and num_output >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_prompt_tokens + num_output >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return f"Sequence({self.key}, {self.status.name}, {self.num_computed_tokens}/{len(self.token_ids)} tokens)"


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """What one step computes of a sequence: the KV of tokens `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)`."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens are of the prompt; else it is one output token. Kernels may differ by it, for it is the request's alone."""
        return self.sequence.num_computed_tokens < self.sequence.num_prompt_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that the next one is sampled."""
        return self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens
