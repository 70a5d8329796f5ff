"""GGUF's own blocks of 32 weights, taken apart without loss: what `packing` takes, from a tensor's raw bytes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BLOCK_BYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_ZERO_POINT: Final = 8  # of Q4_0's nibbles


def split_q4(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 `[out, in / 32 * block bytes]` of kind Q4_0 or Q4_1 → nibbles, scales and minima as `packing.pack_w4a8` takes them.

    Raises:
        ValueError: another kind, or rows that are not whole blocks.
    """
    if kind not in ("Q4_0", "Q4_1"):
        raise ValueError(f"kind: {kind} is not Q4_0 or Q4_1")
    parts = _blocks(blocks, kind)
    scales = _halves(parts, 0)
    if kind == "Q4_1":
        return parts[:, :, 4:].flatten(1), scales, _halves(parts, 2)
    minima = scales * -_ZERO_POINT  # exact: a power of two
    if not torch.equal(minima.isinf(), scales.isinf()):
        raise ValueError("blocks: a scale of Q4_0 is too large for a float16 minimum")
    return parts[:, :, 2:].flatten(1), scales, minima


def split_q8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 `[out, in / 32 * 34]` of kind Q8_0 → int8 `[out, in]` and float16 scales `[out, in / 32]`.

    Raises:
        ValueError: rows that are not whole blocks.
    """
    parts = _blocks(blocks, "Q8_0")
    return parts[:, :, 2:].flatten(1).view(torch.int8), _halves(parts, 0)


def _blocks(blocks: Tensor, kind: str) -> Tensor:
    size = _BLOCK_BYTES[kind]
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] == 0 or blocks.shape[1] % size:
        raise ValueError(f"blocks: {blocks.dtype} {list(blocks.shape)} is not rows of {kind} blocks of {size} bytes")
    return torch.unflatten(blocks, 1, (-1, size))


def _halves(parts: Tensor, start: int) -> Tensor:
    return parts[:, :, start : start + 2].contiguous().view(torch.float16).squeeze(2)
