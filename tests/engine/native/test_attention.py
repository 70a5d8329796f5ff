"""Paged attention against float64, for both KV dtypes on every instruction set."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.native.attention import NativeAttention
from tests.engine.native.paged_kv import PagedKV, make_layout, random

# Values are up to 5 in size. Weights are rounded to bfloat16, 2^-8 at most but for the largest, which is 1; or to 16 bits; on AMX, weights
# times int8's scales are rounded to bfloat16, and then the largest too.
TOLERANCE = {("bf16", False): 1e-2, ("bf16", True): 1e-2, ("int8", False): 1e-3, ("int8", True): 2.2e-2}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700)
SHAPES = st.fixed_dictionaries(
    {
        "kv_dtype": st.sampled_from(["bf16", "int8"]),
        "block_size": st.sampled_from([16, 32, 64, 128]),
        "head_dim": st.sampled_from([16, 48, 64, 80, 128, 256]),
        "num_kv_heads": st.integers(1, 3),
        "group_size": st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]),
        "window": st.one_of(st.none(), st.integers(1, 300)),
        "scale": st.floats(0.05, 0.5),
        "seed": st.integers(0, 1000),
    }
)
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def build(shape: dict[str, object], lengths: list[int]) -> PagedKV:
    names = ("num_kv_heads", "head_dim", "block_size")
    layout = make_layout(str(shape["kv_dtype"]), **{name: int(str(shape[name])) for name in names})
    return PagedKV.build(layout, lengths, seed=int(str(shape["seed"])))


def assert_near(ours: Tensor, expected: Tensor, kv_dtype: str, isa: str) -> None:
    assert ours.dtype == torch.float32 and ours.shape == expected.shape
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=TOLERANCE[kv_dtype, isa == "amx"])


@SETTINGS
@given(shape=SHAPES, lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4), layer=st.integers(0, 1))
def test_decode(native: ModuleType, isa: str, shape: dict[str, object], lengths: list[int], layer: int) -> None:
    kv = build(shape, lengths)
    scale, window = float(str(shape["scale"])), shape["window"]
    assert window is None or isinstance(window, int)
    queries = random(len(lengths), int(str(shape["group_size"])) * kv.layout.num_kv_heads, kv.layout.head_dim, seed=7)
    ours = kv.attention(native).decode(layer, queries, kv.block_tables, kv.context_lens, scale=scale, window=window)
    expected = [kv.expected(i, layer, queries[i : i + 1], length - 1, scale=scale, window=window) for i, length in enumerate(lengths)]
    assert_near(ours, torch.cat(expected), kv.layout.kv_dtype, isa)


@SETTINGS
@given(shape=SHAPES, first_position=st.sampled_from((0, *LENGTHS)), num_tokens=st.sampled_from(LENGTHS[:-4]))
def test_prefill(native: ModuleType, isa: str, shape: dict[str, object], first_position: int, num_tokens: int) -> None:
    kv = build(shape, [first_position + num_tokens])
    scale, window = float(str(shape["scale"])), shape["window"]
    assert window is None or isinstance(window, int)
    queries = random(num_tokens, int(str(shape["group_size"])) * kv.layout.num_kv_heads, kv.layout.head_dim, seed=7)
    ours = kv.attention(native).prefill(1, queries, first_position, kv.block_tables[0], scale=scale, window=window)
    assert_near(ours, kv.expected(0, 1, queries, first_position, scale=scale, window=window), kv.layout.kv_dtype, isa)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_large_scores_neither_overflow_nor_vanish(native: ModuleType, isa: str, kv_dtype: str) -> None:
    kv = PagedKV.build(make_layout(kv_dtype), [600])
    queries = random(600, 4, 32) * 100
    ours = kv.attention(native).prefill(0, queries, 0, kv.block_tables[0], scale=1.0)
    assert_near(ours, kv.expected(0, 0, queries, 0, scale=1.0, window=None), kv_dtype, isa)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_zero_queries_and_zero_values_are_no_exception(native: ModuleType, isa: str, kv_dtype: str) -> None:
    kv = PagedKV.build(make_layout(kv_dtype), [40])
    attention = kv.attention(native)
    queries = torch.zeros(1, 4, 32)
    ours = attention.decode(0, queries, kv.block_tables, kv.context_lens, scale=1.0)
    assert_near(ours, kv.expected(0, 0, queries, 39, scale=1.0, window=None), kv_dtype, isa)
    kv.storage.zero_()
    assert not attention.decode(0, random(1, 4, 32), kv.block_tables, kv.context_lens, scale=1.0).any()


def test_int8_is_near_the_unquantized_result(native: ModuleType, isa: str) -> None:
    exact = PagedKV.build(make_layout("bf16", head_dim=64), [500], seed=3)
    quantized = PagedKV.build(make_layout("int8", head_dim=64), [500], seed=3)
    queries = random(500, 6, 64)
    expected = exact.expected(0, 0, queries, 0, scale=0.125, window=None)
    error = quantized.attention(native).prefill(0, queries, 0, quantized.block_tables[0], scale=0.125).double() - expected
    assert (error.square().mean() / expected.square().mean()).sqrt() < 0.02


@pytest.fixture
def attention(native: ModuleType) -> NativeAttention:
    return PagedKV.build(make_layout("bf16"), [64, 64]).attention(native)


GOOD_DECODE = {
    "queries": torch.zeros(2, 4, 32),
    "block_tables": torch.zeros(2, 4, dtype=torch.int32),
    "context_lens": torch.tensor([64, 1], dtype=torch.int32),
    "window": 5,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queries", torch.zeros(2, 4, 32, dtype=torch.bfloat16)),
        ("queries", torch.zeros(2, 4, 16)),
        ("queries", torch.zeros(2, 3, 32)),
        ("queries", torch.zeros(2, 34, 32)),
        ("queries", torch.zeros(2, 32, 4).transpose(1, 2)),
        ("block_tables", torch.zeros(2, 4, dtype=torch.int64)),
        ("block_tables", torch.zeros(3, 4, dtype=torch.int32)),
        ("block_tables", torch.full((2, 4), 8, dtype=torch.int32)),
        ("block_tables", torch.full((2, 4), -1, dtype=torch.int32)),
        ("context_lens", torch.tensor([64, 0], dtype=torch.int32)),
        ("context_lens", torch.tensor([64, 65], dtype=torch.int32)),
        ("context_lens", torch.tensor([64], dtype=torch.int32)),
        ("window", 0),
    ],
)
def test_decode_refuses_what_it_cannot_read(attention: NativeAttention, name: str, value: object) -> None:
    attention.decode(0, **GOOD_DECODE, scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{name}:"):
        attention.decode(0, **GOOD_DECODE | {name: value}, scale=1.0)  # type: ignore[arg-type]


GOOD_PREFILL = {"queries": torch.zeros(20, 4, 32), "first_position": 44, "block_table": torch.zeros(4, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("queries", torch.zeros(0, 4, 32), "queries"),
        ("first_position", 45, "first_position"),
        ("first_position", -1, "first_position"),
        ("block_table", torch.zeros(4), "block_table"),
        ("block_table", torch.full((4,), 9, dtype=torch.int32), "block_tables"),
    ],
)
def test_prefill_refuses_what_it_cannot_read(attention: NativeAttention, name: str, value: object, message: str) -> None:
    attention.prefill(0, **GOOD_PREFILL, scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{message}:"):
        attention.prefill(0, **GOOD_PREFILL | {name: value}, scale=1.0)  # type: ignore[arg-type]


def test_storage_must_fit_the_layout(native: ModuleType) -> None:
    layout = make_layout("bf16")
    memory = torch.zeros(3, layout.block_bytes + 64, dtype=torch.uint8)
    for storage in (memory, memory[:, 32:-32], memory[:, :-64].view(torch.int8), memory.flatten()):
        with pytest.raises(ValueError, match=r"^storage:"):
            NativeAttention(native, layout, storage)
