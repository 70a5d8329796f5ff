"""The kernel sets that are made of `Operations`: torch's own kernels, and the reference."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from cluster.engine.kernels import KernelSet
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.layers import OperationsDecoder, OperationsHead
from cluster.engine.model import Decoder, Head
from cluster.engine.operations import Linear, Operations
from cluster.engine.quantization import make_scheme
from cluster.engine.rope import RotaryTable
from cluster.engine.row_kv_cache import PACKING, RowKVCache
from cluster.engine.weights import FusedWeight
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig


class OperationsKernels(KernelSet[Linear]):
    """See `KernelSet`."""

    packing = PACKING

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    @property
    def name(self) -> str:
        return self._operations.name

    @property
    def shares_generated(self) -> bool:
        return self._operations.shares_generated

    def make_linear(self, scheme: str, weight: FusedWeight, bias: Tensor | None) -> Linear:
        return make_scheme(scheme).make_linear(weight.floats(), bias, self._operations)

    def make_decoder(self, layers: Iterable[LayerParts[Linear]], config: ModelConfig, rotary: RotaryTable) -> Decoder:
        return OperationsDecoder(layers, config, rotary, self._operations)

    def make_head(self, norm: Tensor, lm_head: Linear, config: ModelConfig) -> Head:
        return OperationsHead(norm, lm_head, config, self._operations)

    def make_cache(self, layout: KVLayout, storage: Tensor) -> KVCache:
        return RowKVCache(layout, storage)
