"""What a device must compute for a decoder, behind one small interface; everything else of the model is device independent.

Activations between operations are float32 `[num_tokens, features]`; an operation rounds inside as its scheme says.
Promise P0 is made here: unless an implementation says otherwise, the bits of a row of any result (in the schemes bf16 and int8) depend on
that row's own inputs alone, never on the other rows of the batch or on how many they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.row_kv_cache import RowKVCache


class Linear(Protocol):
    """A prepared weight."""

    def __call__(self, x: Tensor) -> Tensor:
        """float32 `[num_tokens, in_features]` → float32 `[num_tokens, out_features]`."""


class Attention(Protocol):
    """One step's attention, planned for its batch; called once a layer after the step's K and V are in the cache."""

    def __call__(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """Causal attention over the cached contexts.

        Args:
            layer: whose K and V to read.
            queries: float32 `[num_tokens, num_heads, head_dim]`, rotated.
            window: a query sees itself and the `window - 1` tokens before it; None: all before it.

        Returns:
            float32 `[num_tokens, num_heads * head_dim]`.
        """


class Operations(ABC):
    """One device's implementation. Stateless: weights live in the linears, contexts in the cache."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The kernel set's name in the numerics domain: equal names compute equal bits."""

    @property
    def shares_generated(self) -> bool:
        """See `KernelSet.shares_generated`."""
        return True

    @abstractmethod
    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear that multiplies in the dtype of `weight` (float32 or bfloat16, `[out, in]`) and sums in float32. `bias` is float32."""

    @abstractmethod
    def int8_linear(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
        """W8A8: `weight` is int8 `[out, in]` with one float32 scale a row; each row of activations gets a scale of its own."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension, in float32."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`[num_tokens, 2 * n]` → `silu(first half) * second half`."""

    @abstractmethod
    def plan_attention(self, batch: ForwardBatch, cache: RowKVCache, num_heads: int, scale: float) -> Attention:
        """Prepares what all layers of a step share: indexes, masks, groups of equal shapes."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place: `heads` is `[num_tokens, num_heads, head_dim]`; `cos` and `sin` come from `RotaryTable.at`.

        Separate products and sums, each rounded: a fused multiply-add would round by where in a vector an element falls.
        """
        halves = torch.unflatten(heads, -1, (2, -1))
        by_cos = halves * cos
        by_sin = halves * sin
        torch.sub(by_cos[:, :, 0], by_sin[:, :, 1], out=halves[:, :, 0])
        torch.add(by_cos[:, :, 1], by_sin[:, :, 0], out=halves[:, :, 1])


def quantize_rows(x: Tensor, num_filled: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric 8 bits with one scale a row: float32 `[rows, n]` → (uint8 `[rows, n]` with zero point 128, float32 scales `[rows, 1]`).

    `num_filled` rows of zeros follow in the levels, for kernels that want certain numbers of rows.
    """
    # Many times faster than the vector norm of order infinity.
    scales = x.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-30).mul_(1 / 127)
    # torch converts floats to int8 faster than to uint8; flipping the highest bit then adds 128.
    levels = torch.empty(x.shape[0] + num_filled, x.shape[1], dtype=torch.int8)
    levels[: x.shape[0]] = torch.div(x, scales).round_()
    levels[x.shape[0] :] = 0
    return levels.view(torch.uint8).bitwise_xor_(128), scales
