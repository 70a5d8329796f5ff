"""Weights in the order in which the matrix kernels read them; `csrc/linear.h` and `csrc/tiles.inl` say which.

Every packer fills panels of 32 output channels, 64-byte vectors of 16 channels by 4 bytes along k, the last panel filled up with zeros.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cluster.engine.huge_pages import huge_page_zeros
from cluster.engine.native.limits import GROUP_SIZE, PANEL_CHANNELS

_K_MULTIPLE: Final = 64  # of W8A8, whose kernels take 64 values along k at a time


def pack_w8a8(levels: Tensor, scales: Tensor) -> Tensor:
    """int8 `[out, in]` and float32 `[out]` → uint8 panels."""
    padded = torch.nn.functional.pad(levels, (0, -levels.shape[1] % _K_MULTIPLE))
    corrections = padded.sum(dim=1, dtype=torch.int32) * 128
    parts = [_panels(padded.view(torch.uint8)), _by_panel(scales.float()), _by_panel(corrections)]
    return _joined(parts)


def pack_w8g32(levels: Tensor, scales: Tensor) -> Tensor:
    """int8 `[out, in]` and float16 `[out, in / 32]` → uint8 panels."""
    unsigned = levels.view(torch.uint8).bitwise_xor(128)
    return _joined([_panels(unsigned), _by_panel(scales)])


def pack_w4a8(nibbles: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """uint8 `[out, in / 2]` and float16 `[out, in / 32]` each → uint8 panels.

    Args:
        nibbles: for each group 16 bytes, with value j in the low and value j + 16 in the high nibble of byte j, as in GGUF.
        scales: a weight is `scale * nibble + minimum`.
        minima: see `scales`.
    """
    return _joined([_panels(nibbles), _by_panel(scales), _by_panel(minima)])


def pack_bf16(weight: Tensor) -> Tensor:
    """bfloat16 `[out, in]` → uint8 panels."""
    return _joined([_panels(weight.contiguous().view(torch.uint8))])


def quantize_nibbles(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float `[out, in]` → what `pack_w4a8` takes, from the least to the greatest of each group in 15 steps."""
    groups = torch.unflatten(weight.float(), 1, (-1, GROUP_SIZE))
    minima = groups.amin(dim=2).half()
    scales = ((groups.amax(dim=2) - minima.float()) / 15).half()
    divisors = scales.float().clamp_min(torch.finfo(torch.float16).smallest_normal)[..., None]
    levels = ((groups - minima.float()[..., None]) / divisors).round_().clamp_(0, 15).to(torch.uint8)
    low, high = levels.chunk(2, dim=2)
    return (low | high << 4).flatten(1), scales, minima


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float `[out, in]` → int8 `[out, in]` in -127…127 and float16 scales `[out, in / 32]`."""
    groups = torch.unflatten(weight.float(), 1, (-1, GROUP_SIZE))
    scales = (groups.abs().amax(dim=2) / 127).half()
    divisors = scales.float().clamp_min(torch.finfo(torch.float16).smallest_normal)[..., None]
    return (groups / divisors).round_().clamp_(-127, 127).to(torch.int8).flatten(1), scales


def _panels(data: Tensor) -> Tensor:
    """uint8 `[out, bytes along k]` → `[panels, groups of k or 1, …]`: for each 4 bytes along k the 32 channels of a panel."""
    padded = torch.nn.functional.pad(data, (0, 0, 0, -data.shape[0] % PANEL_CHANNELS))
    return padded.view(-1, PANEL_CHANNELS, padded.shape[1] // 4, 4).transpose(1, 2)


def _by_panel(values: Tensor) -> Tensor:
    """`[out]` or `[out, groups]` of any dtype → uint8 `[panels, groups, 32 * itemsize]`."""
    columns = values if values.ndim == 2 else values[:, None]
    padded = torch.nn.functional.pad(columns, (0, 0, 0, -columns.shape[0] % PANEL_CHANNELS))
    return padded.view(-1, PANEL_CHANNELS, padded.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    """Writes the parts of each group of each panel one after another into memory on huge pages."""
    num_panels = parts[0].shape[0]
    num_groups = parts[-1].shape[1] if len(parts) > 1 else 1
    widths = [part.numel() // (num_panels * num_groups) for part in parts]
    packed = huge_page_zeros(num_panels * num_groups * sum(widths)).view(num_panels, num_groups, sum(widths))
    for part, to in zip(parts, torch.split(packed, widths, dim=2), strict=True):
        # Reshaped without a copy: the large part is only a transposed view of what came in.
        shape = (num_panels, num_groups, part.shape[1] // num_groups, *part.shape[2:])
        to.view(shape).copy_(part.view(shape))
    return packed.flatten()
