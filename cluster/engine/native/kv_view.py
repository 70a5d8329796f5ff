"""How the kernels see a KV pool: blocks in the packing "vnni" (`kv_packing`)."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cluster.engine.native.kv_packing import check_layout
from cluster.kv_layout import KVLayout

_ALIGNMENT = 64


def kv_view(native: ModuleType, layout: KVLayout, storage: Tensor, layer: int) -> object:
    """The kernels' view of one layer of a pool, which must outlive it.

    Args:
        native: the compiled module.
        layout: of a block.
        storage: uint8 `[num_blocks, block_bytes]`; blocks may lie further apart than they are long.
        layer: the layer.

    Raises:
        ValueError: a layout, dtype, shape or alignment that the kernels do not know; names it.
    """
    check_layout(layout)
    if storage.dtype != torch.uint8 or storage.dim() != 2 or storage.shape[1] != layout.block_bytes or storage.stride(1) != 1:
        raise ValueError(f"storage: {storage.dtype} {list(storage.shape)} is not uint8 [num_blocks, {layout.block_bytes}]")
    if storage.data_ptr() % _ALIGNMENT or storage.stride(0) % _ALIGNMENT or storage.stride(0) < layout.block_bytes:
        raise ValueError(f"storage: blocks are not apart and aligned to {_ALIGNMENT} bytes")
    return native.KvView(
        storage.data_ptr() + layer * layout.layer_stride,
        storage.stride(0),
        layout.head_stride,
        layout.kv_stride,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        layout.kv_dtype == "int8",
    )
