"""Rotary position embedding in the Hugging Face order: the first half of a head turns against the second half."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cluster.model_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[head_dim / 2]` of `dtype`: radians a position, scaled as the checkpoint wants it."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Waves shorter than the original context stay; much longer ones are stretched by `factor`; those in between are blended."""
    original = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / config.low_freq_factor, frequencies / config.factor, frequencies)
    is_between = (wavelengths <= original / config.low_freq_factor) & (wavelengths >= original / config.high_freq_factor)
    return torch.where(is_between, blended, scaled)


class RotaryTable:
    """Cosines and sines of all positions a model may use."""

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config, head_dim))
        self.cos = angles.cos()  # float32 [max_positions, head_dim / 2], as is sin
        self.sin = angles.sin()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for a step's rows: float32 `[num_tokens, 1, 1, head_dim / 2]` each."""
        shape = (positions.shape[0], 1, 1, self.cos.shape[1])
        return self.cos.index_select(0, positions).view(shape), self.sin.index_select(0, positions).view(shape)
