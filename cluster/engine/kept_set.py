"""Which tokens may be drawn: top-k, then top-p over what top-k kept, then min-p against the likeliest.

A set is everything at or above a threshold, so tokens with equal logits stay or go together and no order among them matters. A row's
threshold is computed in the same way whatever the other rows ask for (P0): among its 1,024 likeliest tokens where they decide it, else
among all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cluster.types import SamplingParams

_NUM_CANDIDATES: Final = 1024


def keep_likeliest(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets what is not kept to -inf, in place. `logits` is float32 `[rows, vocab_size]`, divided by the temperature already."""
    active = [row for row, sampling in enumerate(params) if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0]
    if not active:
        return
    index = torch.tensor(active)
    chosen = [params[row] for row in active]
    rows = logits[index]
    thresholds = torch.maximum(_top_thresholds(rows, chosen), _min_p_thresholds(rows, chosen))
    logits[index] = rows.masked_fill_(rows < thresholds[:, None], -torch.inf)


def _min_p_thresholds(rows: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    offsets = torch.tensor([math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf for sampling in params])
    return rows.amax(dim=-1) + offsets


def _top_thresholds(rows: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab_size = rows.shape[1]
    thresholds = torch.full((len(params),), -torch.inf)
    asking = [row for row, sampling in enumerate(params) if sampling.top_k > 0 or sampling.top_p < 1]
    narrow = [row for row in asking if params[row].top_k <= _NUM_CANDIDATES]
    undecided = _decide(rows, params, narrow, min(_NUM_CANDIDATES, vocab_size), thresholds)
    wide = undecided + [row for row in asking if params[row].top_k > _NUM_CANDIDATES]
    _decide(rows, params, wide, vocab_size, thresholds)
    return thresholds


def _decide(rows: Tensor, params: Sequence[SamplingParams], which: list[int], num_candidates: int, thresholds: Tensor) -> list[int]:
    """Fills in the thresholds of the rows `which`, and returns those whose set reaches beyond the candidates."""
    if not which:
        return []
    index = torch.tensor(which)
    candidates = rows[index].topk(num_candidates, dim=-1).values  # descending
    top_k = torch.tensor([params[row].top_k for row in which])
    top_p = torch.tensor([params[row].top_p for row in which])
    has_k = (top_k > 0) & (top_k < rows.shape[1])
    last = torch.where(has_k, top_k, num_candidates).clamp_max_(num_candidates) - 1
    in_k = (candidates >= candidates.gather(1, last[:, None])) | ~has_k[:, None]
    weights = (candidates - candidates[:, :1]).exp_().masked_fill_(~in_k, 0.0)
    mass = weights.cumsum(dim=-1)
    all_mass = (rows[index] - candidates[:, :1]).exp_().sum(dim=-1)
    total = torch.where(has_k, mass[:, -1], all_mass)
    before = torch.cat([torch.zeros(len(which), 1), mass[:, :-1]], dim=1)
    limit = torch.where(top_p < 1, top_p * total, torch.inf)
    kept = in_k & (before < limit[:, None])
    kept[:, 0] = True
    cut = candidates.gather(1, kept.sum(dim=-1, keepdim=True) - 1)[:, 0]
    is_decided = has_k | (mass[:, -1] >= limit) | (num_candidates == rows.shape[1])
    thresholds[index] = torch.where(is_decided, cut, -torch.inf)
    return [row for row, decided in zip(which, is_decided.tolist(), strict=True) if not decided]
