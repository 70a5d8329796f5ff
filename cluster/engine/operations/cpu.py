"""CPU operations on what torch ships: oneDNN linears and its fused attention kernel.

How each keeps a row's bits free of its neighbours (P0):

    int8 linear   the sums are exact integers, of whole weights or of halves; see `_Int8Linear`
    bf16 linear   oneDNN splits K by the number of rows, so it always gets tiles of exactly ROWS_PER_TILE rows
    attention     see `cpu_attention`
    elementwise   products, sums and `exp` have the same bits in vector bodies and scalar tails; torch's `silu` and `sigmoid` do not
    rms_norm      a row's sum has one order, given its length

float32 linears are torch's own: tokens equal, logprobs within 1e-4.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.engine.forward_batch import ForwardBatch
from cluster.engine.operations.base import Attention, Linear, Operations, quantize_rows
from cluster.engine.operations.cpu_attention import CpuAttention
from cluster.engine.row_kv_cache import RowKVCache

# Larger tiles make prefill faster and decode slower; with 64 rows oneDNN reaches half its peak.
ROWS_PER_TILE: Final = 64
ROWS_PER_INT8_TILE: Final = 16  # of AMX; fewer rows are computed as they are


class CpuOperations(Operations):
    """For x86 with AVX-512 or AMX; runs, slower, on any CPU that torch supports."""

    @property
    def name(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability().lower()
        more = "-amx" if torch.cpu._is_amx_tile_supported() else "" if has_byte_products() else "-halves"
        return f"torch-{capability}{more}"

    @property
    def shares_generated(self) -> bool:
        """Without AMX torch's attention sums a single query in another order than a prompt's, for some shapes (AVX2, AVX-512)."""
        return bool(torch.cpu._is_amx_tile_supported())

    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.dtype == torch.bfloat16:
            return _TiledLinear(weight, bias)
        return lambda x: F.linear(x, weight, bias)

    def int8_linear(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Linear:
        return _Int8Linear(weight, scales, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1])
        scale: Tensor = mean_square.add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        result = gate.neg().exp_().add_(1.0)
        return torch.div(gate, result, out=result).mul_(up)

    def plan_attention(self, batch: ForwardBatch, cache: RowKVCache, num_heads: int, scale: float) -> Attention:
        return CpuAttention(batch, cache, num_heads, scale)


class _TiledLinear:
    """bfloat16, in tiles of a fixed number of rows; the last tile is filled up with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._is_packed = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_PER_TILE) if self._is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        tiles = torch.split(self._filled(x), ROWS_PER_TILE)
        results = [self._multiply(tile) for tile in tiles]
        y = (results[0] if len(results) == 1 else torch.cat(results))[:num_rows].float()
        return y if self._bias is None else y.add_(self._bias)

    def _filled(self, x: Tensor) -> Tensor:
        missing = -x.shape[0] % ROWS_PER_TILE
        if missing == 0:
            return x.bfloat16()
        filled = torch.zeros(x.shape[0] + missing, x.shape[1], dtype=torch.bfloat16)
        filled[: x.shape[0]] = x
        return filled

    def _multiply(self, tile: Tensor) -> Tensor:
        if self._is_packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(tile, self._weight, None, "none", [], "")
            return result
        return F.linear(tile, self._weight)


class _Int8Linear:
    """W8A8 through oneDNN, which wants unsigned activations: signed ones fall into a path 200 times slower.

    oneDNN compiles a kernel for each shape that it meets and keeps the last 1,024: with every number of rows a shape of its own that is
    half a GiB, and some milliseconds whenever a step has a number that is not kept. So rows are filled up to whole tiles.

    Without VNNI it adds two products in 16 bits, which saturates for weights beyond 64 in magnitude (twice 255 by 64 is just below 2^15):
    there a weight is the sum of two halves, and the exact product costs two of them.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        parts = [weight] if has_byte_products() else [weight >> 1, weight - (weight >> 1)]
        self._packed = [torch.ops.onednn.qlinear_prepack(part, [32, weight.shape[1]]) for part in parts]
        self._scales = scales
        self._zero_points = torch.zeros_like(scales, dtype=torch.int32)
        self._bias = bias
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        levels, row_scales = quantize_rows(x, num_filled=-num_rows % ROWS_PER_INT8_TILE if num_rows > ROWS_PER_INT8_TILE else 0)
        filled = self._product(levels, self._packed[0])
        for packed in self._packed[1:]:
            filled.add_(self._product(levels, packed))
        y = filled[:num_rows].mul_(row_scales)
        return y if self._bias is None else y.add_(self._bias)

    def _product(self, levels: Tensor, packed: Tensor) -> Tensor:
        result: Tensor = self._multiply(
            levels, 1.0, 128, packed, self._scales, self._zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result


def has_byte_products() -> bool:
    """Whether this CPU sums products of bytes in 32 bits (VNNI)."""
    return bool(torch.cpu._is_vnni_supported())
