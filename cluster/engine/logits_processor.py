"""What a request does to its logits before a token is chosen: bias, minimum length, penalties, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.types import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sequence at the moment its next token is sampled."""

    sampling: SamplingParams
    token_ids: Sequence[int]  # prompt and output
    num_prompt_tokens: int

    @property
    def position(self) -> int:
        """Of the token to be sampled."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class LogitsProcessor:
    """Batched: the entries that the rows touch are gathered into one index for each rule."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Float32 `[rows, vocab_size]`: the argument itself where no row changes anything, else a changed copy."""
        rules: list[tuple[Callable[[SampleRow], bool], Callable[[Tensor, list[tuple[int, SampleRow]]], None]]] = [
            (lambda row: bool(row.sampling.logit_bias), _add_bias),
            (lambda row: row.num_output_tokens < row.sampling.min_tokens, self._hide_ends),
            (lambda row: row.sampling.repetition_penalty != 1.0, _penalize_repetition),
            (lambda row: row.sampling.presence_penalty != 0.0 or row.sampling.frequency_penalty != 0.0, _penalize_counts),
        ]
        result = logits
        for applies, apply in rules:
            touched = [(index, row) for index, row in enumerate(rows) if applies(row)]
            if touched:
                result = logits.clone() if result is logits else result
                apply(result, touched)
        return result

    def _hide_ends(self, logits: Tensor, rows: list[tuple[int, SampleRow]]) -> None:
        """No EOS and no stop token before `min_tokens` have come."""
        pairs = [(index, token_id) for index, row in rows for token_id in self._ends(row.sampling)]
        if pairs:
            index = torch.tensor(pairs).t()
            logits[index[0], index[1]] = -torch.inf

    def _ends(self, sampling: SamplingParams) -> tuple[int, ...]:
        return sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)


def _add_bias(logits: Tensor, rows: list[tuple[int, SampleRow]]) -> None:
    entries = [(index, token_id, bias) for index, row in rows for token_id, bias in row.sampling.logit_bias]
    indices = torch.tensor([index for index, _, _ in entries])
    token_ids = torch.tensor([token_id for _, token_id, _ in entries])
    logits[indices, token_ids] += torch.tensor([bias for _, _, bias in entries])


def _penalize_repetition(logits: Tensor, rows: list[tuple[int, SampleRow]]) -> None:
    """Tokens of the prompt and the output become less likely by a factor, whatever the sign of their logit."""
    for index, row in rows:
        seen = torch.unique(torch.tensor(row.token_ids))
        values = logits[index, seen]
        penalty = row.sampling.repetition_penalty
        logits[index, seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_counts(logits: Tensor, rows: list[tuple[int, SampleRow]]) -> None:
    """Tokens of the output lose a constant, and another for each time they came."""
    for index, row in rows:
        output = torch.tensor(row.token_ids[row.num_prompt_tokens :], dtype=torch.int64)
        seen, counts = torch.unique(output, return_counts=True)
        sampling = row.sampling
        logits[index, seen] -= counts * sampling.frequency_penalty + sampling.presence_penalty
