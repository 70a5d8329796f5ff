"""Chooses the next token of each row.

raw logits ─► logprobs
    │
    └─► bias, min_tokens, penalties ─► temperature 0: the largest
                                  └──► else: / temperature ─► top-k, top-p, min-p ─► + noise ─► the largest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cluster.engine.gumbel import gumbel, noise_key
from cluster.engine.kept_set import keep_likeliest
from cluster.engine.logits_processor import LogitsProcessor, SampleRow
from cluster.types import TokenOutput

_GREEDY_BELOW: Final = 1e-5  # smaller temperatures would overflow
_MIN_TOP: Final = 20  # asked of `topk` always, so that the order of equal logprobs does not depend on what other rows want


class Sampler:
    """Stateless: a row's outcome is a function of its logits, its parameters and its tokens."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._process = LogitsProcessor(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[TokenOutput]:
        """One token for each row of float32 `[rows, vocab_size]`; the logits are left as they are."""
        token_ids = self._choose(self._process(logits, rows), rows)
        outputs = [TokenOutput(token_id) for token_id in token_ids]
        wanting = [index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        if wanting:
            logprobs = torch.log_softmax(logits[torch.tensor(wanting)], dim=-1)
            tops = logprobs.topk(min(logits.shape[1], max(_MIN_TOP, *(rows[index].sampling.num_logprobs or 0 for index in wanting))))
            for found, index in enumerate(wanting):
                num_top = rows[index].sampling.num_logprobs or 0
                top_ids, top_values = tops.indices[found, :num_top].tolist(), tops.values[found, :num_top].tolist()
                logprob = float(logprobs[found, token_ids[index]])
                outputs[index] = TokenOutput(token_ids[index], logprob, tuple(zip(top_ids, top_values, strict=True)))
        return outputs

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        drawing = [index for index, row in enumerate(rows) if row.sampling.temperature >= _GREEDY_BELOW]
        if len(drawing) == len(rows):
            return _draw(logits.clone(), rows)
        token_ids = _likeliest(logits)
        if drawing:
            drawn = _draw(logits[torch.tensor(drawing)], [rows[index] for index in drawing])
            for index, token_id in zip(drawing, drawn, strict=True):
                token_ids[index] = token_id
        return token_ids


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """`logits` is a copy."""
    logits /= torch.tensor([[row.sampling.temperature] for row in rows])
    keep_likeliest(logits, [row.sampling for row in rows])
    noise = gumbel([noise_key(row.sampling.seed, 0, row.position) for row in rows], logits.shape[1])
    return _likeliest(noise.add_(logits))


def _likeliest(logits: Tensor) -> list[int]:
    """The first of the largest in each row. numpy's argmax uses vectors, torch's does not and takes ten times as long."""
    token_ids: list[int] = logits.numpy().argmax(axis=-1).tolist()
    return token_ids
