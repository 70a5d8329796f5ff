"""Linears of the native kernels: weights packed in one of these formats, for rows of float32.

    format   weights                                              activations
    W8A8     int8, one float32 scale an output channel            int8, one scale a row
    W8G32    int8 in groups of 32 with a float16 scale (Q8_0)     int8 in groups of 32
    W4A8     4 bit in groups of 32, float16 scale and minimum     int8 in groups of 32
             (Q4_0 and Q4_1)
    BF16     bfloat16                                             rounded to bfloat16

The bits of an output row depend on that row alone (P0), whatever the number of rows and threads. The three int8 formats give the same
bits on every instruction set; BF16 does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.engine.native import gguf_blocks, packing
from cluster.engine.native.build import native_module
from cluster.engine.native.checks import check_vector
from cluster.engine.native.limits import GROUP_SIZE, PANEL_CHANNELS
from cluster.engine.quantization import quantize_channels


class NativeLinear:
    """A packed weight and its bias, which the decoder and the head multiply with."""

    format: str

    def __init__(self, panels: Tensor, out_features: int, in_features: int, bias: Tensor | None) -> None:
        """
        Args:
            panels: of this format, from `packing`.
            bias: float32 `[out_features]`.

        Raises:
            ValueError: a shape, a dtype, or a size that does not fit; names it.
        """
        self._native = native_module()
        weight_format = getattr(self._native.WeightFormat, self.format)
        if in_features <= 0 or in_features % GROUP_SIZE:
            raise ValueError(f"in_features: {in_features} is not a positive multiple of {GROUP_SIZE}")
        num_panels = -(-out_features // PANEL_CHANNELS)
        expected = num_panels * self._native.panel_bytes(weight_format, in_features)
        if out_features <= 0 or panels.dtype != torch.uint8 or panels.numel() != expected or not panels.is_contiguous():
            raise ValueError(f"panels: {panels.dtype} {list(panels.shape)} are not the {expected} bytes of [{out_features}, {in_features}]")
        if panels.data_ptr() % 64:
            raise ValueError("panels: not aligned to 64 bytes")
        if bias is not None:
            check_vector("bias", bias, out_features)
        self._panels, self._bias = panels, bias  # the kernels only have their addresses
        self.out_features, self.in_features = out_features, in_features
        self.weight = self._native.Weight(
            weight_format, out_features, in_features, panels.data_ptr(), 0 if bias is None else bias.data_ptr()
        )

    @property
    def num_bytes(self) -> int:
        """Of the packed weight: what one row of activations has to read."""
        return self._panels.numel()


class W8A8Linear(NativeLinear):
    """Per-channel int8 weights, per-token int8 activations."""

    format = "W8A8"

    @classmethod
    def from_levels(cls, levels: Tensor, scales: Tensor, bias: Tensor | None = None) -> W8A8Linear:
        """int8 `[out, in]`, float32 `[out]`."""
        if levels.dtype != torch.int8:
            raise ValueError(f"levels: {levels.dtype} is not int8")
        _check_columns(levels)
        check_vector("scales", scales, levels.shape[0])
        return cls(packing.pack_w8a8(levels, scales), levels.shape[0], levels.shape[1], bias)

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> W8A8Linear:
        """Quantizes a float weight `[out, in]`."""
        _check_columns(weight)
        return cls.from_levels(*quantize_channels(weight), bias)


class W8G32Linear(NativeLinear):
    """int8 weights in groups of 32."""

    format = "W8G32"

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> W8G32Linear:
        """Quantizes a float weight `[out, in]`."""
        _check_columns(weight)
        return cls(packing.pack_w8g32(*packing.quantize_groups(weight)), weight.shape[0], weight.shape[1], bias)

    @classmethod
    def from_gguf(cls, blocks: Tensor, bias: Tensor | None = None) -> W8G32Linear:
        """Raw Q8_0 blocks, uint8 `[out, in / 32 * 34]`, without loss."""
        levels, scales = gguf_blocks.split_q8(blocks)
        return cls(packing.pack_w8g32(levels, scales), levels.shape[0], levels.shape[1], bias)


class W4A8Linear(NativeLinear):
    """4-bit weights in groups of 32."""

    format = "W4A8"

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> W4A8Linear:
        """Quantizes a float weight `[out, in]`."""
        _check_columns(weight)
        return cls(packing.pack_w4a8(*packing.quantize_nibbles(weight)), weight.shape[0], weight.shape[1], bias)

    @classmethod
    def from_gguf(cls, blocks: Tensor, kind: str, bias: Tensor | None = None) -> W4A8Linear:
        """Raw blocks of kind Q4_0 or Q4_1, uint8 `[out, in / 32 * block bytes]`, without loss."""
        nibbles, scales, minima = gguf_blocks.split_q4(blocks, kind)
        return cls(packing.pack_w4a8(nibbles, scales, minima), nibbles.shape[0], 2 * nibbles.shape[1], bias)


class Bf16Linear(NativeLinear):
    """bfloat16 on both sides, sums in float32."""

    format = "BF16"

    @classmethod
    def from_float(cls, weight: Tensor, bias: Tensor | None = None) -> Bf16Linear:
        """Rounds a float weight `[out, in]`."""
        _check_columns(weight)
        return cls(packing.pack_bf16(weight.bfloat16()), weight.shape[0], weight.shape[1], bias)


def _check_columns(weight: Tensor) -> None:
    if weight.ndim != 2 or weight.shape[1] % GROUP_SIZE:
        raise ValueError(f"weight: {list(weight.shape)} is not [out, in] with in a multiple of {GROUP_SIZE}")
