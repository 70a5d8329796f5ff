"""The decoder: token ids and a KV cache in, logits of the sampled rows out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.kv_cache import KVCache
from cluster.engine.layers import DecoderLayer, RMSNorm, StepContext
from cluster.engine.operations import Linear, Operations
from cluster.engine.rope import RotaryTable
from cluster.model_config import ModelConfig


class Model:
    """All weights of one checkpoint, prepared by one scheme for one device's operations."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        rotary: RotaryTable,
        operations: Operations,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._lm_head = lm_head
        self._rotary = rotary
        self._operations = operations

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor | None:
        """Computes K and V of the batch's tokens into the cache.

        Returns:
            float32 logits `[num_samples, vocab_size]` after each of `batch.sample_rows`, or None where nothing is sampled.
        """
        cos, sin = self._rotary.at(batch.positions)
        attention = self._operations.plan_attention(batch, cache, self.config.num_heads, self.config.head_dim**-0.5)
        step = StepContext(cache, cache.write_index(batch.slot_mapping), attention, cos, sin)
        hidden = self._embedding.index_select(0, batch.token_ids).float()
        for layer in self._layers:
            layer(hidden, step)
        if batch.sample_rows.shape[0] == 0:
            return None
        return self._lm_head(self._norm(hidden.index_select(0, batch.sample_rows)))
