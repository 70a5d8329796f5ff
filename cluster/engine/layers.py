"""The layers of a decoder over a device's operations: norm, attention, norm, SwiGLU; plain objects over prepared linears."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.interrupt import Interrupt
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.operations import Attention, Linear, Operations
from cluster.engine.rope import RotaryTable
from cluster.engine.row_kv_cache import RowKVCache
from cluster.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of a step share."""

    cache: RowKVCache
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


class OperationsDecoder:
    """See `model.Decoder`: one operation after the other."""

    def __init__(self, layers: Iterable[LayerParts[Linear]], config: ModelConfig, rotary: RotaryTable, operations: Operations) -> None:
        self._config = config
        self._rotary = rotary
        self._operations = operations
        self._layers = [self._layer(index, parts) for index, parts in enumerate(layers)]

    def __call__(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache, interrupt: Interrupt) -> None:
        assert isinstance(cache, RowKVCache)
        cos, sin = self._rotary.at(batch.positions)
        attention = self._operations.plan_attention(batch, cache, self._config.num_heads, self._config.head_dim**-0.5)
        step = StepContext(cache, cache.write_index(batch.slot_mapping), attention, cos, sin)
        for layer in self._layers:
            interrupt.check()
            layer(hidden, step)

    def _layer(self, index: int, parts: LayerParts[Linear]) -> DecoderLayer:
        attention = AttentionLayer(
            layer=index,
            num_heads=self._config.num_heads,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            window=parts.window,
            qkv=parts.qkv,
            output=parts.output,
            q_norm=self._norm(parts.q_norm),
            k_norm=self._norm(parts.k_norm),
            operations=self._operations,
        )
        return DecoderLayer(
            attention_norm=RMSNorm(parts.attention_norm, self._config.rms_norm_eps, self._operations),
            attention=attention,
            mlp_norm=RMSNorm(parts.mlp_norm, self._config.rms_norm_eps, self._operations),
            mlp=MLP(parts.gate_up, parts.down, self._operations),
        )

    def _norm(self, weight: Tensor | None) -> RMSNorm | None:
        return None if weight is None else RMSNorm(weight, self._config.rms_norm_eps, self._operations)


class OperationsHead:
    """See `model.Head`."""

    def __init__(self, norm: Tensor, lm_head: Linear, config: ModelConfig, operations: Operations) -> None:
        self._norm = RMSNorm(norm, config.rms_norm_eps, operations)
        self._lm_head = lm_head

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._lm_head(self._norm(hidden))
