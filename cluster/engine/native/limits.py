"""What the kernels can compute. `csrc/kv_view.h`, `csrc/activations.h` and `csrc/linear.h` say the same to the compiler."""

from __future__ import annotations

from typing import Final

GROUP_SIZE: Final = 32  # values along k with one scale; the inputs of every linear are a multiple of it
PANEL_CHANNELS: Final = 32  # output channels that a weight is packed in
HEAD_DIM_STEP: Final = 16
MAX_HEAD_DIM: Final = 256
MAX_HEADS_PER_KV_HEAD: Final = 16
BLOCK_SIZES: Final = (16, 32, 64, 128)


def why_unfit_head_dim(head_dim: int) -> str | None:
    """What is wrong with it; None when nothing is."""
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        return f"{head_dim} is no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    return None


def why_unfit_block_size(block_size: int) -> str | None:
    """As `why_unfit_head_dim`."""
    if block_size not in BLOCK_SIZES:
        return f"{block_size} is none of {', '.join(map(str, BLOCK_SIZES))}"
    return None
