"""A kernel set that does what another does, and counts: weights as they are held, time inside, and the batches that came."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor

from benchmarks.steps.cost import WeightTotals
from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.interrupt import Interrupt
from cluster.engine.kernels import KernelSet
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.model import Decoder, Head
from cluster.engine.native.linear import NativeLinear
from cluster.engine.rope import RotaryTable
from cluster.engine.weights import FusedWeight
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig

_WEIGHT_BYTES: Final = {"int8": 1, "bf16": 2, "float32": 4}  # of torch's linears
_CHANNEL_BYTES: Final = {"int8": 4, "bf16": 0, "float32": 0}


class MeasuredKernels(KernelSet[Any]):
    """See the module."""

    def __init__(self, kernels: KernelSet[Any]) -> None:
        self._kernels = kernels
        self.packing = kernels.packing
        self.decoder_weights = WeightTotals()
        self.head_weights = WeightTotals()
        self.inside_s = 0.0
        self.batches: list[ForwardBatch] = []

    def reset(self) -> None:
        """Forgets the time and the batches."""
        self.inside_s = 0.0
        self.batches = []

    @property
    def name(self) -> str:
        return self._kernels.name

    @property
    def shares_generated(self) -> bool:
        return self._kernels.shares_generated

    def make_linear(self, scheme: str, weight: FusedWeight, bias: Tensor | None) -> Any:
        linear = self._kernels.make_linear(scheme, weight, bias)
        self.decoder_weights.add(_held_bytes(linear, scheme, weight), weight.out_features * weight.in_features)
        return linear

    def make_lm_head(self, scheme: str, weight: FusedWeight) -> Any:
        linear = self._kernels.make_lm_head(scheme, weight)
        self.head_weights.add(_held_bytes(linear, scheme, weight), weight.out_features * weight.in_features)
        return linear

    def make_decoder(self, layers: Iterable[LayerParts[Any]], config: ModelConfig, rotary: RotaryTable) -> Decoder:
        return _MeasuredDecoder(self, self._kernels.make_decoder(layers, config, rotary))

    def make_head(self, norm: Tensor, lm_head: Any, config: ModelConfig) -> Head:
        return _MeasuredHead(self, self._kernels.make_head(norm, lm_head, config))

    def make_cache(self, layout: KVLayout, storage: Tensor) -> KVCache:
        return self._kernels.make_cache(layout, storage)


class _MeasuredDecoder:
    def __init__(self, totals: MeasuredKernels, decoder: Decoder) -> None:
        self._totals = totals
        self._decoder = decoder

    def __call__(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache, interrupt: Interrupt) -> None:
        started_s = time.perf_counter()
        self._decoder(hidden, batch, cache, interrupt)
        self._totals.inside_s += time.perf_counter() - started_s
        self._totals.batches.append(batch)


class _MeasuredHead:
    def __init__(self, totals: MeasuredKernels, head: Head) -> None:
        self._totals = totals
        self._head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        started_s = time.perf_counter()
        logits = self._head(hidden)
        self._totals.inside_s += time.perf_counter() - started_s
        return logits


def _held_bytes(linear: Any, scheme: str, weight: FusedWeight) -> int:
    if isinstance(linear, NativeLinear):
        return linear.num_bytes
    return weight.out_features * (weight.in_features * _WEIGHT_BYTES[scheme] + _CHANNEL_BYTES[scheme])
