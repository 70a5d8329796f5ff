"""A served pair on a given text: context by the prefill model, its KV blocks handed over, continuation through the decode model.

    1. prefill   every window's context in one step, into the prefill model's own KV cache
    2. hand over its blocks, as they are or repacked, to other block ids of the decode model's KV cache
    3. decode    the continuation one token a step, all windows in one batch, each step given the text's own token

The models, the KV caches and the batches are the engine's; only the choice of the next token is the text's instead of the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.kv_cache import KVCache
from cluster.engine.model_build import BuiltModel
from cluster.engine.sequence import ScheduledSequence
from cluster.engine.sequence import Sequence as EngineSequence
from cluster.kv_transfer.repack import Repacker
from cluster.types import OrderKey, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Continuations:
    """What the decode model says after each token of each continuation."""

    losses: Tensor  # float64 [num_windows, num_steps]: -log p(the text's next token)
    choices: Tensor  # int64 [num_windows, num_steps]: the likeliest next token

    @property
    def perplexity(self) -> float:
        return float(self.losses.mean().exp())

    def agreement(self, base: Continuations) -> float:
        """The share of positions at which both would choose the same token."""
        return float((self.choices == base.choices).double().mean())


def cut_windows(token_ids: Sequence[int], num_context: int, num_continued: int, num_windows: int) -> list[list[int]]:
    """Consecutive windows of a text: `num_context + num_continued` tokens and one more, which is only a target.

    Each continuation starts where the one before ended, so no token is scored twice.

    Raises:
        ValueError: the text is too short.
    """
    needed = num_context + num_continued * num_windows + 1
    if len(token_ids) < needed:
        raise ValueError(f"the text has {len(token_ids)} tokens, {needed} are needed")
    starts = range(0, num_continued * num_windows, num_continued)
    return [list(token_ids[start : start + num_context + num_continued + 1]) for start in starts]


@torch.inference_mode()
def continue_windows(
    prefill: BuiltModel, decode: BuiltModel, windows: Sequence[Sequence[int]], num_context: int, on_step: Callable[[int, Tensor], None]
) -> Continuations:
    """Runs a pair over windows of equal length; `on_step` gets the index of each decode step and its logits `[num_windows, vocab_size]`.

    Raises:
        TicketMismatch: the prefill model's blocks cannot become the decode model's.
    """
    repacker = Repacker(prefill.layout, decode.layout)
    num_steps = len(windows[0]) - 1 - num_context
    sequences = [_sequence(index, window[:num_context]) for index, window in enumerate(windows)]
    cache = _hand_over(_prefill(prefill, sequences), repacker, decode, sequences, num_context + num_steps)
    losses, choices = [], []
    for step in range(num_steps):
        targets = torch.tensor([window[num_context + step + 1] for window in windows])
        for sequence, window in zip(sequences, windows, strict=True):
            sequence.num_computed_tokens = len(sequence.token_ids)
            sequence.token_ids.append(window[num_context + step])
        logits = _forward(decode, cache, sequences)
        losses.append(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none"))
        choices.append(logits.argmax(-1))
        on_step(step, logits)
    return Continuations(torch.stack(losses, 1), torch.stack(choices, 1))


def _sequence(index: int, context: Sequence[int]) -> EngineSequence:
    request = Request(f"window-{index}", 1, tuple(context), SamplingParams(max_tokens=1, seed=0), OrderKey(0.0, index))
    return EngineSequence(request, max_num_tokens=len(context), max_num_blocks=0, stops_at_first_token=False, prefix=None)


def _prefill(built: BuiltModel, sequences: Sequence[EngineSequence]) -> KVCache:
    num_blocks = built.layout.num_blocks_for(len(sequences[0].token_ids))
    cache = _cache(built, num_blocks * len(sequences))
    for index, sequence in enumerate(sequences):
        sequence.block_table[:] = range(index * num_blocks, (index + 1) * num_blocks)
        _forward(built, cache, [sequence])
    return cache


def _hand_over(source: KVCache, repacker: Repacker, decode: BuiltModel, sequences: Sequence[EngineSequence], num_tokens: int) -> KVCache:
    """Gives every sequence blocks of the decode model's cache; its first ones get what the prefill blocks hold."""
    num_blocks = decode.layout.num_blocks_for(num_tokens)
    cache = _cache(decode, num_blocks * len(sequences))
    for index, sequence in enumerate(sequences):
        block_ids = list(range(index * num_blocks, (index + 1) * num_blocks))
        blocks = source.read_blocks(sequence.block_table)
        handed_over = blocks if source.layout == decode.layout else repacker.repack(blocks)
        cache.write_blocks(block_ids[: len(handed_over)], handed_over)
        sequence.block_table[:] = block_ids
    return cache


def _cache(built: BuiltModel, num_blocks: int) -> KVCache:
    return built.make_cache(torch.zeros((num_blocks, built.layout.block_bytes), dtype=torch.uint8))


def _forward(built: BuiltModel, cache: KVCache, sequences: Sequence[EngineSequence]) -> Tensor:
    """Computes all uncomputed tokens; logits `[num_seqs, vocab_size]` after the last one of each."""
    scheduled = [ScheduledSequence(sequence, sequence.num_uncomputed_tokens) for sequence in sequences]
    logits = built.model.forward(ForwardBatch.build(scheduled, built.layout.block_size), cache)
    assert logits is not None  # every row reaches its last known token
    return logits
