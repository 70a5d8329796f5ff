"""A kernel set: how a machine computes a decoder, from the packing of weights to that of KV blocks. Its name is in the domain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from torch import Tensor

from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.model import Decoder, Head
from cluster.engine.rope import RotaryTable
from cluster.engine.weights import FusedWeight
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig

L = TypeVar("L")  # a prepared linear


class KernelSet(ABC, Generic[L]):
    """Makes the parts of a model for one device."""

    packing: str  # of KV blocks

    @property
    @abstractmethod
    def name(self) -> str:
        """Equal names compute equal bits."""

    @property
    def shares_generated(self) -> bool:
        """Whether decode steps leave the bits in KV that a prefill of the same tokens would: then later prompts may share them (P0)."""
        return True

    @abstractmethod
    def make_linear(self, scheme: str, weight: FusedWeight, bias: Tensor | None) -> L:
        """Prepares a weight by a scheme of the config; `bias` is `[out_features]`.

        Raises:
            ConfigError: for `scheme`, when this kernel set has none of that name.
        """

    def make_lm_head(self, scheme: str, weight: FusedWeight) -> L:
        """Prepares the projection to the vocabulary, of which some schemes take better care."""
        return self.make_linear(scheme, weight, None)

    @abstractmethod
    def make_decoder(self, layers: Iterable[LayerParts[L]], config: ModelConfig, rotary: RotaryTable) -> Decoder:
        """Puts the layers together."""

    @abstractmethod
    def make_head(self, norm: Tensor, lm_head: L, config: ModelConfig) -> Head:
        """Puts the last norm, float32 `[hidden_size]`, and the projection together."""

    @abstractmethod
    def make_cache(self, layout: KVLayout, storage: Tensor) -> KVCache:
        """The KV pool over uint8 `[num_blocks, block_bytes]`.

        Raises:
            ConfigError: the kernels do not know the layout.
        """
