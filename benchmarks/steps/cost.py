"""What a step has to do at least: bytes to read once, and operations, a product and a sum being two.

bytes        the packed weights of the decoder, those of the head when something is sampled, and the KV that the step's tokens see.
             Embeddings, norms, activations and what is written are left out: less than 1 % of it
operations   of the linears, and of attention: scores and weighted values of every token that a token sees. Work that masks discard
             does not count
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig


@dataclass(slots=True)
class WeightTotals:
    """Of some linears, as they are held."""

    num_bytes: int = 0
    num_weights: int = 0

    def add(self, num_bytes: int, num_weights: int) -> None:
        """Counts one more linear."""
        self.num_bytes += num_bytes
        self.num_weights += num_weights


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step, or of several together."""

    read_bytes: int = 0
    linear_operations: int = 0
    attention_operations: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.read_bytes + other.read_bytes,
            self.linear_operations + other.linear_operations,
            self.attention_operations + other.attention_operations,
        )

    @property
    def operations(self) -> int:
        return self.linear_operations + self.attention_operations


class CostModel:
    """Steps of one model over one layout of KV."""

    def __init__(self, config: ModelConfig, layout: KVLayout, decoder: WeightTotals, head: WeightTotals) -> None:
        self._config = config
        self._layer_token_bytes = layout.layer_stride / layout.block_size
        self._decoder = decoder
        self._head = head
        self._windows = Counter(config.sliding_windows)  # window → how many layers have it

    def step(self, batch: ForwardBatch) -> StepCost:
        """What the step that computes `batch` has to do."""
        num_samples = batch.sample_rows.shape[0]
        weight_bytes = self._decoder.num_bytes + (self._head.num_bytes if num_samples else 0)
        products = self._decoder.num_weights * batch.num_tokens + self._head.num_weights * num_samples
        num_read = sum(number * _num_read(batch.spans, window) for window, number in self._windows.items())
        num_seen = sum(number * _num_seen(batch.spans, window) for window, number in self._windows.items())
        return StepCost(
            read_bytes=weight_bytes + round(self._layer_token_bytes * num_read),
            linear_operations=2 * products,
            attention_operations=4 * self._config.num_heads * self._config.head_dim * num_seen,
        )


def _num_read(spans: Sequence[BatchSpan], window: int | None) -> int:
    """Tokens whose K and V one layer reads, each once for all tokens of its span."""
    return sum(span.end - (0 if window is None else max(0, span.position + 1 - window)) for span in spans)


def _num_seen(spans: Sequence[BatchSpan], window: int | None) -> int:
    """Pairs of a token and one that it sees."""
    return sum(min(position + 1, window or span.end) for span in spans for position in range(span.position, span.end))
