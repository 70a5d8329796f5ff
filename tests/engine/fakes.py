"""A model whose next token is a digest of all tokens before it, and whose "KV" of a token is that digest too.

`FakeRunner` writes the digests through the block table, and checks that every token before the ones it computes reads back as the
digest of the sequence's own tokens: any mistake with blocks, shares, moves or transfers shows at the next step of whom it hurts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import torch

from cluster.engine.engine import Engine, StepRunner
from cluster.engine.interrupt import Interrupt
from cluster.engine.kv_cache import KVCache
from cluster.engine.row_kv_cache import RowKVCache
from cluster.engine.scheduler import SchedulerLimits
from cluster.engine.sequence import ScheduledSequence, SequenceStatus
from cluster.engine.sequence_factory import EngineIdentity
from cluster.kv_layout import KVLayout
from cluster.types import FinishReason, OrderKey, Request, SamplingParams, TokenOutput

BLOCK_SIZE: Final = 4
VOCAB_SIZE: Final = 50
EOS: Final = 7
DIGEST_BYTES: Final = 16
LAYOUT: Final = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=BLOCK_SIZE, kv_dtype="float32")


def digests(token_ids: Seq[int]) -> list[bytes]:
    """For each token, the digest of it and all before it."""
    result: list[bytes] = []
    for token_id in token_ids:
        result.append(hashlib.blake2b((result[-1] if result else b"") + bytes([token_id]), digest_size=DIGEST_BYTES).digest())
    return result


def next_token(token_ids: Seq[int]) -> int:
    return digests(token_ids)[-1][0] % VOCAB_SIZE


def generate_alone(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What any engine must make of the request: the rules once more, without blocks and batches."""
    token_ids = list(request.prompt_token_ids)
    sampling = request.sampling
    while True:
        token_ids.append(next_token(token_ids))
        num_output = len(token_ids) - request.num_prompt_tokens
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        if token_ids[-1] in stops and num_output >= sampling.min_tokens:
            return token_ids[request.num_prompt_tokens :], FinishReason.STOP
        if num_output == sampling.max_tokens or len(token_ids) == max_model_len:
            return token_ids[request.num_prompt_tokens :], FinishReason.LENGTH


def slot_of(kv_cache: KVCache, block_id: int, offset: int) -> torch.Tensor:
    """Where the digest of the block's token `offset` lies."""
    start = offset * LAYOUT.head_dim * 4
    return kv_cache.storage[block_id, start : start + DIGEST_BYTES]


class FakeRunner:
    """Checks what it is given to run as a real one could not."""

    def __init__(self, kv_cache: KVCache, limits: SchedulerLimits) -> None:
        self.kv_cache = kv_cache
        self.limits = limits
        self.steps: list[list[tuple[str, int]]] = []
        self.raises: list[Exception] = []  # one at each of the next runs
        self.drops_outputs = False
        self.interrupt = Interrupt()

    def run(self, scheduled: Seq[ScheduledSequence]) -> list[TokenOutput | None]:
        self.steps.append([(row.sequence.key, row.num_scheduled_tokens) for row in scheduled])
        if self.raises:
            raise self.raises.pop(0)
        assert 0 < len(scheduled) <= self.limits.max_num_seqs
        assert sum(row.num_scheduled_tokens for row in scheduled) <= self.limits.max_num_batched_tokens
        assert len({row.sequence.key for row in scheduled}) == len(scheduled)
        return [] if self.drops_outputs else [self._run_row(row) for row in scheduled]

    def _run_row(self, row: ScheduledSequence) -> TokenOutput | None:
        sequence, end = row.sequence, row.sequence.num_computed_tokens + row.num_scheduled_tokens
        assert row.num_scheduled_tokens > 0 and end <= len(sequence.token_ids)
        assert sequence.status is SequenceStatus.RUNNING
        known = digests(sequence.token_ids[:end])
        for position in range(end):
            slot = slot_of(self.kv_cache, sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            if position >= sequence.num_computed_tokens:
                slot.copy_(torch.frombuffer(bytearray(known[position]), dtype=torch.uint8))
            assert bytes(slot.tolist()) == known[position], f"{sequence} reads another's KV at token {position}"
        return TokenOutput(known[-1][0] % VOCAB_SIZE, -float(end)) if end == len(sequence.token_ids) else None


@dataclass(frozen=True)
class Pool:
    """The sizes that scheduling depends on."""

    num_blocks: int = 64
    num_swap_slots: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    num_reserved_blocks: int = 2


DEFAULT_POOL: Final = Pool()


def make_engine(
    pool: Pool = DEFAULT_POOL,
    *,
    max_model_len: int = 120,
    domain: str = "fake",
    prefix_caching: bool = True,
    wrap: Callable[[FakeRunner], StepRunner] = lambda runner: runner,
) -> tuple[Engine, FakeRunner]:
    """An engine over the fake model, which runs it as `wrap` makes it."""
    limits = SchedulerLimits(BLOCK_SIZE, pool.max_num_seqs, pool.max_num_batched_tokens, pool.num_reserved_blocks)
    identity = EngineIdentity("fake", domain, VOCAB_SIZE, frozenset({EOS}), max_model_len, prefix_caching)
    kv_cache = RowKVCache(LAYOUT, torch.zeros((pool.num_blocks, LAYOUT.block_bytes), dtype=torch.uint8))
    runner = FakeRunner(kv_cache, limits)
    return Engine(identity, limits, LAYOUT, kv_cache, wrap(runner), num_swap_slots=pool.num_swap_slots), runner


def make_request(name: str, prompt: Seq[int], max_tokens: int = 10, *, priority: float = 0.0, **sampling: object) -> Request:
    """Later in order with a higher `priority`, then by name."""
    params = SamplingParams(max_tokens=max_tokens, seed=0, **sampling)  # type: ignore[arg-type]
    return Request(name, 0, tuple(prompt), params, OrderKey(priority, 0))
