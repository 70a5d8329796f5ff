"""Where everything lies in a KV block, and which blocks can become which.

A block's bytes are `[layer][K | V][kv_head]{data, then its scales, padded to 64}`, contiguous for all layers: a handoff is a few
large pieces, and one layer of a block is a slice of it. Memory order is wire order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

KV_DTYPE_BYTES: Final = {"float32": 4, "bf16": 2, "int8": 1}
_SCALE_BYTES: Final = {"float32": 0, "bf16": 0, "int8": 2}  # one fp16 per token and head
_ALIGNMENT: Final = 64
_PACKINGS: Final = {"float32": ("rows",), "bf16": ("rows", "vnni"), "int8": ("vnni",)}
_NARROWER: Final = {"float32": ("bf16", "int8"), "bf16": ("int8",), "int8": ()}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where everything lies in a block. The bytes of two workers' blocks mean the same exactly when their layouts are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    kv_dtype: str  # a key of KV_DTYPE_BYTES
    # Order inside one head's data. "rows": [block_size, head_dim]. "vnni", as dot-product instructions want it: K is
    # [head_dim / k, block_size, k] with k = 2 in bf16, 4 in int8 (bytes with zero point 128), V is [block_size / 2, head_dim, 2].
    packing: str = "rows"

    @property
    def data_bytes(self) -> int:
        """Bytes of one head's data in one block, without scales and padding."""
        return self.block_size * self.head_dim * KV_DTYPE_BYTES[self.kv_dtype]

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head to the next."""
        used = self.data_bytes + self.block_size * _SCALE_BYTES[self.kv_dtype]
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @property
    def kv_stride(self) -> int:
        """Bytes from K to V."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer to the next."""
        return 2 * self.kv_stride

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.layer_stride

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


def can_become(source: str, destination: str) -> bool:
    """Whether KV of one dtype can be stored as another: as it is, or with fewer bits. (With more it would only look more exact.)"""
    return source == destination or destination in _NARROWER.get(source, ())


def why_no_handover(source: KVLayout, destination: KVLayout) -> str | None:
    """Why a prompt's KV in blocks of `source` cannot go into blocks of `destination`: the field at fault, a colon, the reason.

    None when it can: as it is where the two are equal, else repacked by the reader.
    """
    return None if source == destination else next(_misfits(source, destination), None)


def _misfits(source: KVLayout, destination: KVLayout) -> Iterator[str]:
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            yield f"{name}: {ours} and {theirs} differ"
    if not can_become(source.kv_dtype, destination.kv_dtype):
        yield f"kv_dtype: {source.kv_dtype} cannot become {destination.kv_dtype}"
    for layout in (source, destination):
        if layout.packing not in _PACKINGS.get(layout.kv_dtype, ()):
            yield f"packing: {layout.kv_dtype} in {layout.packing} is not known"
    if source.head_dim % 4:
        yield f"head_dim: {source.head_dim} is no multiple of 4, so blocks pass only between equal pools"
    small, large = sorted((source.block_size, destination.block_size))
    if small < 2 or small % 2 or large % small:
        yield f"block_size: {source.block_size} and {destination.block_size} are not even numbers of which one is a multiple of the other"
