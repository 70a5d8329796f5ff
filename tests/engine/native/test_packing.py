"""Packed weights hold what went in: taken apart again by the layout's words, and GGUF's blocks without loss."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.engine.native import gguf_blocks, packing
from cluster.engine.native.linear import W4A8Linear, W8G32Linear
from tests.engine.native.activations import apply
from tests.engine.native.formats import random, spread, unfold_nibbles

OUT, IN = 45, 96


def unpacked(panels: Tensor, num_groups: int, num_steps: int) -> tuple[Tensor, Tensor]:
    """Panels of `num_groups` groups → bytes along k, uint8 `[out, num_groups, num_steps, 4]`, and each group's other bytes."""
    size = num_steps * 2 * 64
    groups = panels.view(2, num_groups, -1)
    by_lane = groups[:, :, :size].reshape(2, num_groups, num_steps, 2, 16, 4)
    return by_lane.permute(0, 3, 4, 1, 2, 5).reshape(64, num_groups, num_steps, 4)[:OUT], groups[:, :, size:]


def channels(rest: Tensor, dtype: torch.dtype, index: int) -> Tensor:
    """The `index`-th row of 32 numbers of every group → `[out, groups]`."""
    numbers = torch.unflatten(rest.contiguous().view(dtype), 2, (-1, 32))[:, :, index]
    return numbers.permute(0, 2, 1).reshape(64, -1)[:OUT]


def raw_blocks(kind: str) -> tuple[Tensor, Tensor]:
    """Blocks as in a file, and the values the package reads from them."""
    tensor_type = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(random(OUT, IN).numpy(), tensor_type)
    values = np.array(gguf.quants.dequantize(blocks, tensor_type))
    return torch.from_numpy(blocks.copy()), torch.from_numpy(values)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_q4_blocks_lose_nothing(kind: str) -> None:
    blocks, values = raw_blocks(kind)
    nibbles, scales, minima = gguf_blocks.split_q4(blocks, kind)
    assert torch.equal((unfold_nibbles(nibbles).double() * spread(scales) + spread(minima)).float(), values)
    data, rest = unpacked(packing.pack_w4a8(nibbles, scales, minima), IN // 32, 4)
    assert torch.equal(data.reshape(OUT, -1), nibbles)
    assert torch.equal(channels(rest, torch.float16, 0), scales)
    assert torch.equal(channels(rest, torch.float16, 1), minima)


def test_q8_blocks_lose_nothing() -> None:
    blocks, values = raw_blocks("Q8_0")
    levels, scales = gguf_blocks.split_q8(blocks)
    assert torch.equal((levels.double() * spread(scales)).float(), values)
    data, rest = unpacked(packing.pack_w8g32(levels, scales), IN // 32, 8)
    assert torch.equal((data.reshape(OUT, -1) ^ 128).view(torch.int8), levels)
    assert torch.equal(channels(rest, torch.float16, 0), scales)


def test_w8a8_panels() -> None:
    levels = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8)
    scales = random(OUT)
    data, rest = unpacked(packing.pack_w8a8(levels, scales), 1, 128 // 4)
    assert torch.equal(data.reshape(OUT, -1)[:, :IN].view(torch.int8), levels)
    assert not data.reshape(OUT, -1)[:, IN:].any()
    assert torch.equal(channels(rest, torch.float32, 0)[:, 0], scales)
    assert torch.equal(channels(rest, torch.int32, 1)[:, 0], levels.sum(1).int() * 128)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_multiply_as_their_values(kind: str) -> None:
    blocks, values = raw_blocks(kind)
    linear = W8G32Linear.from_gguf(blocks) if kind == "Q8_0" else W4A8Linear.from_gguf(blocks, kind)
    columns = apply(linear, 127 * torch.eye(IN)) / 127  # each row has one level, 127, and a scale of 1
    assert torch.allclose(columns.T, values, rtol=1e-6, atol=1e-6)


def test_nibbles_are_the_nearest_of_sixteen() -> None:
    weight = random(OUT, IN)
    nibbles, scales, minima = packing.quantize_nibbles(weight)
    error = (unfold_nibbles(nibbles).double() * spread(scales) + spread(minima) - weight).abs()
    assert (error <= 0.5 * spread(scales) + 2.0**-10 * weight.abs().max()).all()


def test_blocks_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="Q5_0"):
        gguf_blocks.split_q4(torch.zeros(2, 22, dtype=torch.uint8), "Q5_0")
    with pytest.raises(ValueError, match="Q4_0 blocks of 18 bytes"):
        gguf_blocks.split_q4(torch.zeros(2, 20, dtype=torch.uint8), "Q4_0")
    with pytest.raises(ValueError, match="too large"):
        gguf_blocks.split_q4(torch.tensor([[255, 123] + 16 * [0]], dtype=torch.uint8), "Q4_0")
