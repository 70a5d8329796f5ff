"""One decoder layer: norm, attention, norm, SwiGLU; plain objects over prepared linears."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cluster.engine.kv_cache import KVCache
from cluster.engine.operations import Attention, Linear, Operations


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of a step share."""

    cache: KVCache
    write_index: Tensor
    attention: Attention
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """A norm's weight, float32 `[n]`."""

    weight: Tensor
    eps: float
    operations: Operations

    def __call__(self, x: Tensor) -> Tensor:
        return self.operations.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Fused q, k, v projection, rotary embedding, cache, attention, output projection."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    qkv: Linear
    output: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    operations: Operations

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        queries = heads[:, : self.num_heads]
        keys = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            queries.copy_(self.q_norm(queries))
            keys.copy_(self.k_norm(keys))
        self.operations.rotate(heads[:, : self.num_heads + self.num_kv_heads], step.cos, step.sin)
        step.cache.write(self.layer, step.write_index, heads[:, self.num_heads :])
        return self.output(step.attention(self.layer, queries, self.window))


@dataclass(frozen=True, slots=True)
class MLP:
    """SwiGLU with gate and up projections fused."""

    gate_up: Linear
    down: Linear
    operations: Operations

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.operations.silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Adds attention and MLP to the residual stream, float32 `[num_tokens, hidden_size]`, in place."""

    attention_norm: RMSNorm
    attention: AttentionLayer
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, hidden: Tensor, step: StepContext) -> None:
        hidden += self.attention(self.attention_norm(hidden), step)
        hidden += self.mlp(self.mlp_norm(hidden))
