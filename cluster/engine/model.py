"""The decoder: token ids and a KV cache in, logits of the sampled rows out."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.interrupt import Interrupt
from cluster.engine.kv_cache import KVCache
from cluster.model_config import ModelConfig


class Decoder(Protocol):
    """All layers, prepared by one scheme for one kernel set."""

    def __call__(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache, interrupt: Interrupt) -> None:
        """From the embeddings, float32 `[num_tokens, hidden_size]`, to the last layer's output, in place; K and V go to the cache.

        Raises:
            StepInterrupted: `interrupt` was set before the last layer.
        """


class Head(Protocol):
    """The last norm and the projection to the vocabulary."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """float32 `[num_rows, hidden_size]` → float32 `[num_rows, vocab_size]`."""


class Model:
    """All weights of one checkpoint."""

    def __init__(self, config: ModelConfig, *, embedding: Tensor, decoder: Decoder, head: Head) -> None:
        self.config = config
        self.interrupt = Interrupt()
        self._embedding = embedding
        self._decoder = decoder
        self._head = head

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor | None:
        """Computes K and V of the batch's tokens into the cache.

        Returns:
            float32 logits `[num_samples, vocab_size]` after each of `batch.sample_rows`, or None where nothing is sampled.

        Raises:
            StepInterrupted: `interrupt` was set meanwhile, on another thread.
        """
        hidden = self._embedding.index_select(0, batch.token_ids).float()
        self._decoder(hidden, batch, cache, self.interrupt)
        num_samples = batch.sample_rows.shape[0]
        if num_samples == 0:
            return None
        return self._head(hidden if num_samples == batch.num_tokens else hidden.index_select(0, batch.sample_rows))
