"""What one decoder layer is made of, whatever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

L = TypeVar("L")  # a prepared linear


@dataclass(frozen=True, slots=True)
class LayerParts(Generic[L]):
    """Norms are float32 vectors; linears are prepared by a scheme for a kernel set."""

    attention_norm: Tensor  # [hidden_size]
    qkv: L  # outputs: heads of q, of k, of v
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    window: int | None  # a token sees itself and the `window - 1` before it
    output: L
    mlp_norm: Tensor  # [hidden_size]
    gate_up: L  # outputs: gates, ups
    down: L
