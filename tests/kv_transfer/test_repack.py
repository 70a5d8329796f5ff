"""Repacking against a walk over single values: every pair of dtypes, packings and block sizes, and against the kernels' own writes."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import TicketMismatch
from cluster.kv_layout import KVLayout
from cluster.kv_transfer.repack import Repacker
from tests.engine.native import kv_blocks

SIZES = (8, 16, 32, 64, 128, 256)
KINDS = (("float32", "rows"), ("bf16", "rows"), ("bf16", "vnni"), ("int8", "vnni"))
PAIRS = [
    (source, destination)
    for source in KINDS
    for destination in KINDS
    if ("float32", "bf16", "int8").index(source[0]) <= ("float32", "bf16", "int8").index(destination[0])
]


def address(layout: KVLayout, row: tuple[int, int, int], token: int, dim: int) -> int:
    """Where in a block a value lies: the packing as `KVLayout` tells it. `row` is (layer, K or V, head)."""
    layer, part, head = row
    start = layer * layout.layer_stride + part * layout.kv_stride + head * layout.head_stride
    size = {"float32": 4, "bf16": 2, "int8": 1}[layout.kv_dtype]
    in_word = 4 // size
    if layout.packing == "rows":
        index = token * layout.head_dim + dim
    elif part == 0:
        index = (dim // in_word * layout.block_size + token) * in_word + dim % in_word
    else:
        index = (token // 2 * layout.head_dim + dim) * 2 + token % 2
    return start + index * size


def scale_address(layout: KVLayout, row: tuple[int, int, int], token: int) -> int:
    return address(layout, row, 0, 0) + layout.data_bytes + 2 * token


def bf16_bits(x: np.float32) -> int:
    """To nearest, ties to even, by trying the two neighbours."""
    bits = int.from_bytes(struct.pack("<f", x), "little")
    below = bits >> 16
    rest = bits & 0xFFFF
    return below + (rest > 0x8000 or (rest == 0x8000 and below % 2 == 1))


def fp16_scale(row: np.ndarray) -> np.float16:
    """rowmax / 127 towards zero, and up below fp16's normal numbers: by trying neighbours."""
    exact = np.float32(np.abs(row).max()) / np.float32(127)
    with np.errstate(over="ignore"):
        found = np.float16(min(exact, np.float32(65504)))
    if exact >= 2.0**-14:
        return np.nextafter(found, np.float16(0)) if np.float32(found) > exact else found
    return np.nextafter(found, np.float16(1)) if np.float32(found) < exact else found


def values_of(layout: KVLayout, block: np.ndarray, row: tuple[int, int, int], token: int) -> np.ndarray:
    """Float32 `[head_dim]`."""
    width = 4 if layout.kv_dtype == "float32" else 2
    raw = [bytes(block[(at := address(layout, row, token, dim)) : at + width]) for dim in range(layout.head_dim)]
    padded = [bytes(4 - width) + item for item in raw]  # bf16 is the upper half of float32
    return np.array([struct.unpack("<f", item)[0] for item in padded], dtype=np.float32)


def put(
    source: KVLayout, destination: KVLayout, blocks: tuple[np.ndarray, np.ndarray], tokens: tuple[int, int], row: tuple[int, int, int]
) -> None:
    """One token's row from one block to another, value by value."""
    dims = range(destination.head_dim)
    old, new = blocks
    if source.kv_dtype == destination.kv_dtype:
        width = {"float32": 4, "bf16": 2, "int8": 1}[source.kv_dtype]
        for dim in dims:
            at, to = address(source, row, tokens[0], dim), address(destination, row, tokens[1], dim)
            new[to : to + width] = old[at : at + width]
        if source.kv_dtype == "int8":
            at, to = scale_address(source, row, tokens[0]), scale_address(destination, row, tokens[1])
            new[to : to + 2] = old[at : at + 2]
        return
    values = values_of(source, old, row, tokens[0])
    if destination.kv_dtype == "bf16":
        for dim in dims:
            to = address(destination, row, tokens[1], dim)
            new[to : to + 2] = list(struct.pack("<H", bf16_bits(values[dim])))
        return
    scale = fp16_scale(values)
    to = scale_address(destination, row, tokens[1])
    new[to : to + 2] = list(scale.tobytes())
    levels = np.clip(values / (np.float32(scale) or np.float32(1)), -127, 127)
    for dim in dims:
        new[address(destination, row, tokens[1], dim)] = (int(np.rint(levels[dim])) + (128 if row[1] == 0 else 0)) % 256


def walked(source: KVLayout, destination: KVLayout, blocks: torch.Tensor) -> torch.Tensor:
    """What `Repacker.repack` shall return."""
    num_tokens = blocks.shape[0] * source.block_size
    new = np.zeros((destination.num_blocks_for(num_tokens), destination.block_bytes), dtype=np.uint8)
    rows = [(layer, part, head) for layer in range(source.num_layers) for part in range(2) for head in range(source.num_kv_heads)]
    for token in range(num_tokens):
        (old_block, old), (new_block, now) = divmod(token, source.block_size), divmod(token, destination.block_size)
        for row in rows:
            put(source, destination, (blocks.numpy()[old_block], new[new_block]), (old, now), row)
    return torch.from_numpy(new)


def random_blocks(layout: KVLayout, num_blocks: int, seed: int = 0, magnitude: float = 1.0) -> torch.Tensor:
    """Any bytes for int8; for floats normally distributed values, as numbers that are none are no KV."""
    generator = torch.Generator().manual_seed(seed)
    if layout.kv_dtype == "int8":
        return torch.randint(0, 256, (num_blocks, layout.block_bytes), dtype=torch.uint8, generator=generator)
    dtype = torch.float32 if layout.kv_dtype == "float32" else torch.bfloat16
    values = torch.randn(num_blocks, layout.block_bytes // dtype.itemsize, generator=generator) * magnitude
    return values.to(dtype).view(torch.uint8)


def layout_of(kind: tuple[str, str], block_size: int, **changes: int) -> KVLayout:
    return replace(KVLayout(1, 1, 4, block_size, *kind), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize("source_size", SIZES)
@pytest.mark.parametrize("destination_size", SIZES)
def test_every_pair_of_sizes_and_kinds(
    source: tuple[str, str], destination: tuple[str, str], source_size: int, destination_size: int
) -> None:
    old, new = layout_of(source, source_size), layout_of(destination, destination_size)
    num_blocks = max(1, 256 // source_size)
    blocks = random_blocks(old, num_blocks)
    assert torch.equal(Repacker(old, new).repack(blocks), walked(old, new, blocks))


@settings(max_examples=30, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    sizes=st.tuples(st.sampled_from(SIZES[:4]), st.sampled_from(SIZES[:4])),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 12, 16])),
    num_blocks=st.integers(1, 5),
    magnitude=st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 1.0, 1e4, 1e8]),
    seed=st.integers(0, 99),
)
def test_any_number_of_blocks_of_any_model(
    *,
    pair: tuple[tuple[str, str], tuple[str, str]],
    sizes: tuple[int, int],
    shape: tuple[int, int, int],
    num_blocks: int,
    magnitude: float,
    seed: int,
) -> None:
    """Also where the last block is not full, heads have padding between them, and scales are tiny, subnormal or at their limit."""
    layers, heads, head_dim = shape
    changes = {"num_layers": layers, "num_kv_heads": heads, "head_dim": head_dim}
    old, new = (layout_of(kind, size, **changes) for kind, size in zip(pair, sizes, strict=True))
    blocks = random_blocks(old, num_blocks, seed, magnitude)
    assert torch.equal(Repacker(old, new).repack(blocks), walked(old, new, blocks))


def test_rows_may_be_a_part_of_a_larger_area() -> None:
    old, new = layout_of(("bf16", "vnni"), 16, num_layers=2), layout_of(("int8", "vnni"), 32, num_layers=2)
    area = random_blocks(old, 12)
    assert torch.equal(Repacker(old, new).repack(area[3:8]), Repacker(old, new).repack(area[3:8].clone()))


@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1.0, 1e4])
def test_int8_is_what_the_kernels_store_of_the_same_values(magnitude: float) -> None:
    old, new = (layout_of((dtype, "vnni"), 16, num_layers=2, num_kv_heads=2, head_dim=32) for dtype in ("bf16", "int8"))
    blocks = random_blocks(old, 6, magnitude=magnitude)
    assert torch.equal(Repacker(old, new).repack(blocks), kv_blocks.pack(new, *kv_blocks.unpack(old, blocks)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (32, 32)])
def test_there_and_back_is_nothing(kind: tuple[str, str], sizes: tuple[int, int]) -> None:
    old, new = (layout_of(kind, size, num_layers=2, num_kv_heads=2, head_dim=16) for size in sizes)
    blocks = Repacker(old, old).repack(random_blocks(old, 4))  # without the noise in padding
    assert torch.equal(Repacker(new, old).repack(Repacker(old, new).repack(blocks)), blocks)


@pytest.mark.parametrize("magnitude", [0.02, 1.0, 100.0])
@pytest.mark.parametrize("source", [("bf16", "rows"), ("bf16", "vnni"), ("float32", "rows")])
def test_int8_errs_by_at_most_half_a_level(source: tuple[str, str], magnitude: float) -> None:
    """|error| <= rowmax / 254 of every stored value; every row here is above 127 * 2^-14, where scales are normal numbers of fp16."""
    old, new = (layout_of(kind, 16, num_layers=2, num_kv_heads=2, head_dim=64) for kind in (source, ("int8", "vnni")))
    blocks = random_blocks(old, 8, magnitude=magnitude)
    repacked = Repacker(old, new).repack(blocks).numpy()
    for block in range(0, 8, 3):
        for row in [(layer, part, head) for layer in range(2) for part in range(2) for head in range(2)]:
            for token in range(16):
                exact = values_of(old, blocks.numpy()[block], row, token).astype(np.float64)
                at = scale_address(new, row, token)
                scale = repacked[block, at : at + 2].view(np.float16)[0].astype(np.float64)
                raw = np.array([repacked[block, address(new, row, token, dim)] for dim in range(64)])
                levels = raw.astype(np.int64) - 128 if row[1] == 0 else raw.view(np.int8).astype(np.int64)
                rowmax = np.abs(exact).max()
                assert rowmax > 127 * 2.0**-14 or magnitude < 1
                assert (np.abs(levels * scale - exact) <= rowmax / 254 * (1 + 1e-7) + (2.0**-25 if rowmax < 127 * 2.0**-14 else 0)).all()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 2}, "num_layers"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"block_size": 24}, "block_size"),
    ],
)
def test_what_cannot_be_repacked_is_refused_by_name(changes: dict[str, int], field: str) -> None:
    layout = layout_of(("bf16", "vnni"), 16)
    with pytest.raises(TicketMismatch, match=f": {field}: ") as caught:
        Repacker(layout, replace(layout, **changes))  # type: ignore[arg-type]
    assert caught.value.param == "layout"


def test_fewer_bits_cannot_become_more() -> None:
    with pytest.raises(TicketMismatch, match="kv_dtype: int8 cannot become bf16"):
        Repacker(layout_of(("int8", "vnni"), 16), layout_of(("bf16", "vnni"), 16))
