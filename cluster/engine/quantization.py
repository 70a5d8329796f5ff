"""Weight schemes: how a pool computes its linears. A scheme makes a linear from a float weight; the embedding's lookup stays in floats.

float32   the oracle
bf16      weights and activations rounded to bfloat16, sums in float32
int8      W8A8: weights with one scale an output channel, activations with one scale a token; `smoothing.py` moves outliers between them;
          on native kernels the projection to the vocabulary has groups of 32 on both sides
int4      W4A8, weights of 4 bits and activations of 8 in groups of 32, on native kernels; here the weights are expanded to bfloat16
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch
from torch import Tensor

from cluster.engine.operations import Linear, Operations
from cluster.errors import ConfigError


class Scheme(ABC):
    """One way to hold and multiply weights."""

    name: str

    @abstractmethod
    def make_linear(self, weight: Tensor, bias: Tensor | None, operations: Operations) -> Linear:
        """Prepares a weight `[out, in]` in any float dtype; `bias` is `[out]` or None."""


class Float32Scheme(Scheme):
    """Nothing is rounded."""

    name = "float32"

    def make_linear(self, weight: Tensor, bias: Tensor | None, operations: Operations) -> Linear:
        return operations.dense_linear(weight.float(), _float_bias(bias))


class Bf16Scheme(Scheme):
    """The precision most checkpoints are published in."""

    name = "bf16"

    def make_linear(self, weight: Tensor, bias: Tensor | None, operations: Operations) -> Linear:
        return operations.dense_linear(weight.bfloat16(), _float_bias(bias))


class Int4Scheme(Bf16Scheme):
    """A file's 4-bit weights keep their values, not their size: torch has no product with them that would be faster."""

    name = "int4"


class Int8Scheme(Scheme):
    """Symmetric 8 bits on both sides. Per-token activation scales keep a token free of its neighbours (P0)."""

    name = "int8"

    def make_linear(self, weight: Tensor, bias: Tensor | None, operations: Operations) -> Linear:
        levels, scales = quantize_channels(weight)
        return operations.int8_linear(levels, scales, _float_bias(bias))


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[out, in]` → (int8 in -127…127, float32 scales `[out]`), rounded to nearest."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp_min(1e-30) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _float_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


_SCHEMES: Final = {scheme.name: scheme for scheme in (Float32Scheme(), Bf16Scheme(), Int8Scheme(), Int4Scheme())}


def embedding_dtype(scheme: str) -> torch.dtype:
    """In which the rows of the embedding are kept."""
    return torch.float32 if scheme == Float32Scheme.name else torch.bfloat16


def make_scheme(name: str) -> Scheme:
    """The scheme that the config names, of those that torch's own operations can compute.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in _SCHEMES:
        raise ConfigError(f"scheme: {name} is not supported; known are {', '.join(_SCHEMES)}", param="scheme")
    return _SCHEMES[name]
