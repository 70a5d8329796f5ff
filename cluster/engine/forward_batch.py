"""What one step computes, as tensors: built once a step from the scheduled sequences, the same for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.engine.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """Rows `[first_row, first_row + num_tokens)` of the batch are the tokens `[position, end)` of one sequence."""

    first_row: int
    num_tokens: int
    position: int
    block_ids: tuple[int, ...]  # those that hold the tokens [0, end)
    is_prompt: bool  # else one output token

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tokens of a step, those of one sequence in a row, output tokens before prompts. Integer tensors are int64."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]: block_id * block_size + offset
    sample_rows: Tensor  # [num_samples]: rows after which a token is sampled
    spans: tuple[BatchSpan, ...]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_output_tokens(self) -> int:
        """The first rows, one of each sequence; all that follow are of prompts."""
        return sum(not span.is_prompt for span in self.spans)

    @staticmethod
    def build(scheduled: Sequence[ScheduledSequence], block_size: int) -> ForwardBatch:
        """The batch of one step. Every scheduled sequence has blocks for all its scheduled tokens; those of prompts come last."""
        token_ids: list[int] = []
        slots: list[int] = []
        sample_rows: list[int] = []
        spans: list[BatchSpan] = []
        for item in scheduled:
            span = _span(item, len(token_ids), block_size)
            spans.append(span)
            token_ids += item.sequence.token_ids[span.position : span.end]
            slots += _slots(span, block_size)
            if item.samples:
                sample_rows.append(len(token_ids) - 1)
        positions = [position for span in spans for position in range(span.position, span.end)]
        return ForwardBatch(_integers(token_ids), _integers(positions), _integers(slots), _integers(sample_rows), tuple(spans))


def _integers(values: list[int]) -> Tensor:
    """numpy reads a list several times faster than `torch.tensor`."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _span(item: ScheduledSequence, first_row: int, block_size: int) -> BatchSpan:
    sequence = item.sequence
    end = sequence.num_computed_tokens + item.num_scheduled_tokens
    num_blocks = -(-end // block_size)
    assert item.is_prompt or item.num_scheduled_tokens == 1, sequence
    assert item.num_scheduled_tokens > 0 and end <= len(sequence.token_ids) and num_blocks <= len(sequence.block_table), sequence
    return BatchSpan(
        first_row=first_row,
        num_tokens=item.num_scheduled_tokens,
        position=sequence.num_computed_tokens,
        block_ids=tuple(sequence.block_table[:num_blocks]),
        is_prompt=item.is_prompt,
    )


def _slots(span: BatchSpan, block_size: int) -> list[int]:
    if span.num_tokens == 1:
        return [span.block_ids[-1] * block_size + span.position % block_size]
    return [span.block_ids[position // block_size] * block_size + position % block_size for position in range(span.position, span.end)]
