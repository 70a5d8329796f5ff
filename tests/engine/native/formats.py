"""Linears of every format, with the float64 weights that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from cluster.engine.native import packing
from cluster.engine.native.linear import Bf16Linear, NativeLinear, W4A8Linear, W8A8Linear, W8G32Linear
from cluster.engine.quantization import quantize_channels

FORMATS: Final = ("W8A8", "W8G32", "W4A8", "BF16")
KINDS: Final[dict[str, Any]] = {"W8A8": "TOKEN_INT8", "W8G32": "GROUP_INT8", "W4A8": "GROUP_INT8", "BF16": "BF16"}


@dataclass(frozen=True)
class Made:
    """A linear, what it multiplies with, and the step of its activations' grid for a row or group of greatest magnitude 1."""

    linear: NativeLinear
    weight: Tensor
    group: int  # values along k with one activation scale


def make(name: str, weight: Tensor, bias: Tensor | None = None) -> Made:
    """Quantizes `weight`, float `[out, in]`, and keeps the values of the grid it came to."""
    num_inputs = weight.shape[1]
    if name == "W8A8":
        levels, scales = quantize_channels(weight)
        return Made(W8A8Linear.from_float(weight, bias), levels.double() * scales.double()[:, None], num_inputs)
    if name == "W8G32":
        levels, halves = packing.quantize_groups(weight)
        return Made(W8G32Linear.from_float(weight, bias), levels.double() * spread(halves), 32)
    if name == "W4A8":
        nibbles, halves, minima = packing.quantize_nibbles(weight)
        values = unfold_nibbles(nibbles).double() * spread(halves) + spread(minima)
        return Made(W4A8Linear.from_float(weight, bias), values, 32)
    return Made(Bf16Linear.from_float(weight, bias), weight.bfloat16().double(), num_inputs)


def spread(per_group: Tensor) -> Tensor:
    """`[out, groups]` → float64 `[out, in]`."""
    return per_group.double().repeat_interleave(32, dim=1)


def unfold_nibbles(nibbles: Tensor) -> Tensor:
    """uint8 `[out, in / 2]` → uint8 `[out, in]`: low nibbles are the first 16 of a group, high ones the others."""
    groups = torch.unflatten(nibbles, 1, (-1, 16))
    return torch.cat([groups & 15, groups >> 4], dim=2).flatten(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
