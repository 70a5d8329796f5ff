"""Turns a prefill worker's KV blocks into a decode worker's: another block size, another packing, fewer bits a value.

Between equal dtypes bytes only move, so the tokens are the same to the last bit. Fewer bits are rounded as the kernels round what they
compute themselves (`csrc/kv_write.inl`): to bf16 to nearest, ties to even; to int8 with one scale a token and head, which errs by at
most half a level, rowmax / 254 (plus half of fp16's smallest step where the scale is subnormal).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from cluster.errors import TicketMismatch
from cluster.kv_layout import KV_DTYPE_BYTES, KVLayout, why_no_handover

_ELEMENTS: Final = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_WORD_BYTES: Final = 4
_KEYS: Final = 0
_VALUES: Final = 1
_ZERO_POINT: Final = 128  # of keys in int8
_MIN_NORMAL_FP16: Final = 2.0**-14
_STEPS_OF_FP16: Final = 2.0**24  # in 1: the inverse of its smallest
_MAX_FP16: Final = 65504.0
_MAX_FP16_BITS: Final = 0x7BFF


class Repacker:
    """From blocks of one layout to blocks of another. Stateless: use it in any thread."""

    def __init__(self, source: KVLayout, destination: KVLayout) -> None:
        """
        Raises:
            TicketMismatch: blocks of `source` cannot become blocks of `destination`; the message names the field at fault.
        """
        reason = why_no_handover(source, destination)
        if reason is not None:
            raise TicketMismatch(f"blocks cannot be repacked: {reason}", param="layout")
        self.source = source
        self.destination = destination
        self.source_blocks_per_unit = max(1, destination.block_size // source.block_size)  # the least that fills whole blocks
        self._chunk = min(source.block_size, destination.block_size)  # tokens that are neighbours in both layouts

    def repack(self, blocks: Tensor) -> Tensor:
        """The same tokens in the other layout; what the last block has room for beyond them is zero, and so is all padding.

        Args:
            blocks: uint8 `[n, source.block_bytes]` of consecutive tokens.

        Returns:
            uint8 `[destination.num_blocks_for(n * source.block_size), destination.block_bytes]`.
        """
        num_blocks = self.destination.num_blocks_for(blocks.shape[0] * self.source.block_size)
        repacked = torch.zeros(num_blocks, self.destination.block_bytes, dtype=torch.uint8)
        sides = ((self.source, blocks), (self.destination, repacked))
        for part in (_KEYS, _VALUES):
            source, destination = (_elements(*side, part, self._chunk) for side in sides)
            if self.source.kv_dtype == self.destination.kv_dtype:
                _move(source, destination)
                if self.source.kv_dtype == "int8":
                    for x, out in _chunks(*(_scales(*side, part, self._chunk) for side in sides)):
                        out.copy_(x)
            elif self.destination.kv_dtype == "int8":
                _quantize(source, destination, _scales(self.destination, repacked, part, self._chunk), _ZERO_POINT if part == _KEYS else 0)
            else:
                for x, out in _chunks(source, destination):
                    out.copy_(x.reshape(out.shape))
        return repacked


def _elements(layout: KVLayout, blocks: Tensor, part: int, chunk: int) -> Tensor:
    """A view of the values: `[num_blocks, chunks in a block, num_layers, num_kv_heads, chunk / 2, 2, head_dim / n, n values of a word]`."""
    size = KV_DTYPE_BYTES[layout.kv_dtype]
    in_word = _WORD_BYTES // size
    elements = blocks.view(_ELEMENTS[layout.kv_dtype])
    if layout.packing == "rows":
        pair, token, word, value = 2 * layout.head_dim, layout.head_dim, in_word, 1
    elif part == _KEYS:
        pair, token, word, value = 2 * in_word, in_word, layout.block_size * in_word, 1
    else:
        pair, token, word, value = 2 * layout.head_dim, 1, 2 * in_word, 2
    strides = (elements.stride(0), chunk // 2 * pair, layout.layer_stride // size, layout.head_stride // size, pair, token, word, value)
    shape = (*_chunk_shape(layout, blocks, chunk), layout.head_dim // in_word, in_word)
    return elements.as_strided(shape, strides, elements.storage_offset() + part * layout.kv_stride // size)


def _scales(layout: KVLayout, blocks: Tensor, part: int, chunk: int) -> Tensor:
    """A view of the scales, fp16: as `_elements` without its last two dimensions."""
    scales = blocks.view(torch.float16)
    strides = (scales.stride(0), chunk, layout.layer_stride // 2, layout.head_stride // 2, 2, 1)
    first = scales.storage_offset() + (part * layout.kv_stride + layout.data_bytes) // 2
    return scales.as_strided(_chunk_shape(layout, blocks, chunk), strides, first)


def _chunk_shape(layout: KVLayout, blocks: Tensor, chunk: int) -> tuple[int, ...]:
    return (blocks.shape[0], layout.block_size // chunk, layout.num_layers, layout.num_kv_heads, chunk // 2, 2)


def _chunks(source: Tensor, destination: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of equal tokens. The side with the smaller blocks has one chunk a block, and some of its blocks stand for one of the other."""
    if source.shape[1] > 1:
        step = source.shape[1]
        for index in range(step):
            yield source[:, index], destination[index::step, 0]
        return
    step = destination.shape[1]
    for index in range(min(step, source.shape[0])):
        x = source[index::step, 0]
        yield x, destination[: x.shape[0], index]


def _move(source: Tensor, destination: Tensor) -> None:
    for x, out in _chunks(source, destination):
        _copy(x, out)


def _quantize(source: Tensor, levels: Tensor, scales: Tensor, zero_point: int) -> None:
    """`source` is of floats, the other two are views of int8 blocks."""
    for (x, levels_out), (_, scales_out) in zip(_chunks(source, levels), _chunks(source, scales), strict=True):
        rows = _copy(x, torch.empty(x.shape, dtype=x.dtype)).flatten(-2).float()
        scale = _to_fp16(rows.abs().amax(-1).div_(127.0))
        scales_out.copy_(scale)
        divisor = torch.where(scale == 0, 1.0, scale.float())
        rounded = rows.div_(divisor[..., None]).clamp_(-127.0, 127.0).round_().add_(zero_point)
        _copy(rounded.to(torch.int16).to(torch.uint8).reshape(levels_out.shape), levels_out)


def _copy(x: Tensor, out: Tensor) -> Tensor:
    """Word by word, which is faster, where a word's values are neighbours on both sides; returns `out`."""
    if x.dtype == out.dtype and x.stride(-1) == 1 and out.stride(-1) == 1:
        out.view(torch.int32).copy_(x.view(torch.int32))
    else:
        out.copy_(x)
    return out


def _to_fp16(scale: Tensor) -> Tensor:
    """`scale_to_fp16` of `csrc/small_floats.h`: float32, not negative → fp16, towards zero; up where it is subnormal; at most 65504."""
    normal = (scale.view(torch.int32) >> 13) - (112 << 10)
    bits = torch.where(scale >= _MIN_NORMAL_FP16, normal, (scale * _STEPS_OF_FP16).ceil().to(torch.int32))
    return torch.where(scale < _MAX_FP16, bits, _MAX_FP16_BITS).to(torch.int16).view(torch.float16)
