"""Plain torch, one readable line for each formula: the oracle of the other implementations, and the fallback on any device.

Not row invariant: torch picks its matrix kernels by shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.engine.operations.base import Attention, Linear, Operations, quantize_rows
from cluster.engine.row_kv_cache import RowKVCache


class ReferenceOperations(Operations):
    """What the operations mean."""

    @property
    def name(self) -> str:
        return "reference"

    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        def linear(x: Tensor) -> Tensor:
            y = F.linear(x.to(weight.dtype), weight).float()
            return y if bias is None else y + bias

        return linear

    def int8_linear(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
        exact = weight.double().t()  # sums of products of bytes are exact in float64

        def linear(x: Tensor) -> Tensor:
            levels, row_scales = quantize_rows(x)
            y = ((levels.double() - 128) @ exact).float() * scales * row_scales
            return y if bias is None else y + bias

        return linear

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def plan_attention(self, batch: ForwardBatch, cache: RowKVCache, num_heads: int, scale: float) -> Attention:
        return _ReferenceAttention(batch, cache, scale)


class _ReferenceAttention:
    """One sequence after the other, all of its scores at once."""

    def __init__(self, batch: ForwardBatch, cache: RowKVCache, scale: float) -> None:
        self._spans = batch.spans
        self._cache = cache
        self._scale = scale

    def __call__(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        return torch.cat([self._attend(layer, span, queries, window) for span in self._spans])

    def _attend(self, layer: int, span: BatchSpan, queries: Tensor, window: int | None) -> Tensor:
        rows = queries[span.first_row : span.first_row + span.num_tokens]
        num_groups = rows.shape[1] // self._cache.layout.num_kv_heads
        keys = self._context(self._cache.layer_keys(layer), span).repeat_interleave(num_groups, dim=0)
        values = self._context(self._cache.layer_values(layer), span).repeat_interleave(num_groups, dim=0)
        scores = rows.to(self._cache.dtype).float().transpose(0, 1) @ keys.transpose(1, 2) * self._scale
        distance = torch.arange(span.position, span.end)[:, None] - torch.arange(span.end)
        is_hidden = (distance < 0) | (distance >= (window or span.end))
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).flatten(1)

    def _context(self, view: Tensor, span: BatchSpan) -> Tensor:
        """`[num_blocks, num_kv_heads, block_size, head_dim]` → float32 `[num_kv_heads, span.end, head_dim]`."""
        blocks = view[list(span.block_ids)].transpose(0, 1)
        return blocks.flatten(1, 2)[:, : span.end].float()
