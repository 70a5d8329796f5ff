"""The two halves of a linear one by one: rows quantized with the operation before them fused in, and their product with a weight."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from cluster.engine.native.build import native_module
from cluster.engine.native.checks import check_rows, check_vector
from cluster.engine.native.limits import GROUP_SIZE
from cluster.engine.native.linear import NativeLinear

Kind = Literal["TOKEN_INT8", "GROUP_INT8", "BF16"]
_ALIGNMENT: Final = 64
_SIDE_ROWS: Final = 16  # whose scales lie side by side


class Activations:
    """Quantized rows in memory of their own.

    TOKEN_INT8 has one scale a row, GROUP_INT8 one for each 32 values, both from the greatest magnitude; BF16 rounds to the nearest.
    """

    def __init__(self, kind: Kind, num_rows: int, num_columns: int) -> None:
        """
        Raises:
            ValueError: no rows, or columns that are not a positive multiple of 32.
        """
        if num_rows <= 0:
            raise ValueError(f"num_rows: {num_rows} is not positive")
        if num_columns <= 0 or num_columns % GROUP_SIZE:
            raise ValueError(f"num_columns: {num_columns} is not a positive multiple of {GROUP_SIZE}")
        self._native = native_module()
        self.kind = getattr(self._native.ActivationKind, kind)
        self.num_rows, self.num_columns = num_rows, num_columns
        num_bytes = self._native.activation_bytes(self.kind, num_rows, num_columns)
        memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
        self._memory = memory[-memory.data_ptr() % _ALIGNMENT :][:num_bytes]
        self.view = self._native.Activations(self._memory.data_ptr(), self.kind, num_rows, num_columns)

    def fill(self, x: Tensor) -> Activations:
        """From float32 `[num_rows, num_columns]`."""
        check_rows("x", x, self.num_rows, self.num_columns)
        return self._fill(self._native.Source(self._native.Prologue.PLAIN, x.data_ptr(), x.stride(0), 0, 0.0))

    def fill_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Activations:
        """From `x / sqrt(mean(x²) + eps) * weight`; `x` as in `fill`, `weight` float32 `[num_columns]`."""
        check_rows("x", x, self.num_rows, self.num_columns)
        check_vector("weight", weight, self.num_columns)
        source = self._native.Source(self._native.Prologue.RMS_NORM, x.data_ptr(), x.stride(0), weight.data_ptr(), eps)
        return self._fill(source)

    def fill_silu_mul(self, gate_up: Tensor) -> Activations:
        """From `silu(gate) * up`; `gate_up` is float32 `[num_rows, 2 * num_columns]`, gates first."""
        check_rows("gate_up", gate_up, self.num_rows, 2 * self.num_columns)
        return self._fill(self._native.Source(self._native.Prologue.SILU_MUL, gate_up.data_ptr(), gate_up.stride(0), 0, 0.0))

    def levels(self) -> Tensor:
        """int16 `[num_rows, num_columns]` without zero point, or bfloat16."""
        rows = self._memory[: self.num_rows * self.view.row_stride].view(self.num_rows, self.view.row_stride)
        if self.kind.name == "BF16":
            return rows.view(torch.bfloat16)[:, : self.num_columns]
        is_unsigned = self.kind.name == "TOKEN_INT8" and self._native.isa() != "avx2"
        levels = rows[:, : self.num_columns]
        return levels.to(torch.int16) - 128 if is_unsigned else levels.view(torch.int8).to(torch.int16)

    def scales(self) -> Tensor:
        """float32 `[num_rows]`, or `[num_rows, num_columns / 32]`. BF16 has none."""
        num_padded = -(-self.num_rows // _SIDE_ROWS) * _SIDE_ROWS
        num_groups = self.num_columns // GROUP_SIZE if self.kind.name == "GROUP_INT8" else 1
        start = num_padded * self.view.row_stride
        flat = self._memory[start : start + 4 * num_padded * num_groups].view(torch.float32)
        by_row = flat.view(-1, num_groups, _SIDE_ROWS).transpose(1, 2).reshape(num_padded, num_groups)[: self.num_rows]
        return by_row if self.kind.name == "GROUP_INT8" else by_row[:, 0]

    def _fill(self, source: Any) -> Activations:
        self._native.quantize(source, self.view)
        return self


def multiply(linear: NativeLinear, activations: Activations, out: Tensor, *, accumulate: bool = False) -> None:
    """The product with what is quantized already, into float32 `[rows, out_features]` with rows at any distance."""
    native = native_module()
    assert activations.kind == native.activation_kind(getattr(native.WeightFormat, linear.format))
    assert activations.num_columns == linear.in_features
    check_rows("out", out, activations.num_rows, linear.out_features)
    native.matmul(linear.weight, activations.view, native.Output(out.data_ptr(), out.stride(0), accumulate))


def apply(linear: NativeLinear, x: Tensor) -> Tensor:
    """Both halves in one call, as the decoder makes it: float32 `[rows, in_features]` → float32 `[rows, out_features]`."""
    native = native_module()
    check_rows("x", x, len(x), linear.in_features)
    source = native.Source(native.Prologue.PLAIN, x.data_ptr(), x.stride(0), 0, 0.0)
    out = torch.empty(len(x), linear.out_features)
    native.linear(linear.weight, source, len(x), native.Output(out.data_ptr(), linear.out_features, False))
    return out
