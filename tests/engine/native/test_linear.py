"""Each format against what it stands for, in float64, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.engine.native import packing
from cluster.engine.native.linear import Bf16Linear, NativeLinear, W4A8Linear, W8A8Linear, W8G32Linear
from cluster.engine.quantization import quantize_channels
from tests.engine.native.activations import Activations, apply, multiply
from tests.engine.native.formats import FORMATS, KINDS, Made, make, random

EPSILON = 2.0**-23
pytestmark = pytest.mark.usefixtures("native")
shapes = st.tuples(st.integers(1, 70), st.integers(1, 100), st.integers(1, 12).map(lambda groups: 32 * groups))  # rows, out, in
over_shapes = given(shape=shapes, seed=st.integers(0, 1000))
few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def activation_error(made: Made, x: Tensor) -> Tensor:
    """The most that rounding the activations can change each output: half a step of every value times its weight."""
    groups = torch.unflatten(x.double(), 1, (-1, made.group))
    if isinstance(made.linear, Bf16Linear):
        half_steps = groups.abs() * 2.0**-8
    else:
        half_steps = (groups.abs().amax(dim=2, keepdim=True) / 127 / 2 * (1 + 1e-4)).expand_as(groups)
    return torch.matmul(half_steps.flatten(1), made.weight.abs().T)


def rounding_error(made: Made, x: Tensor) -> Tensor:
    """The most that float32 sums can be off, in any order."""
    return x.shape[1] * EPSILON * (x.double().abs() @ made.weight.abs().T) + 1e-30


@pytest.mark.parametrize("name", FORMATS)
@few
@over_shapes
def test_the_product_is_within_the_formats_own_rounding(isa: str, name: str, shape: tuple[int, int, int], seed: int) -> None:
    rows, out, columns = shape
    bias = random(out, seed=seed + 1)
    made = make(name, random(out, columns, seed=seed), bias)
    x = random(rows, columns, seed=seed + 2) * torch.logspace(-3, 3, rows)[:, None]
    exact = x.double() @ made.weight.T + bias.double()
    bound = activation_error(made, x) + rounding_error(made, x) + EPSILON * exact.abs()
    # W4A8 adds a scale and a minimum apart, so what cancels between them rounds too.
    assert ((apply(made.linear, x) - exact).abs() <= bound * (4 if name == "W4A8" else 1)).all()


@few
@over_shapes
def test_w8a8_is_exact_up_to_its_scales(isa: str, shape: tuple[int, int, int], seed: int) -> None:
    rows, out, columns = shape
    levels, scales = quantize_channels(random(out, columns, seed=seed))
    bias = random(out, seed=seed + 1)
    x = random(rows, columns, seed=seed + 2)
    activations = Activations("TOKEN_INT8", rows, columns).fill(x)
    sums = activations.levels().double() @ levels.double().T
    expected = sums.float() * scales * activations.scales()[:, None] + bias
    assert torch.equal(apply(W8A8Linear.from_levels(levels, scales, bias), x), expected)


@pytest.mark.parametrize("name", ["W8G32", "W4A8"])
@few
@over_shapes
def test_groups_are_exact_up_to_float_sums(isa: str, name: str, shape: tuple[int, int, int], seed: int) -> None:
    rows, out, columns = shape
    made = make(name, random(out, columns, seed=seed))
    activations = Activations("GROUP_INT8", rows, columns).fill(random(rows, columns, seed=seed + 2))
    seen = activations.levels().double() * activations.scales().double().repeat_interleave(32, dim=1)
    y = torch.empty(rows, out)
    multiply(made.linear, activations, y)
    magnitude = seen.abs() @ (made.weight.abs() + torch.unflatten(made.weight.abs(), 1, (-1, 32)).amax(2).repeat_interleave(32, dim=1)).T
    assert ((y - seen @ made.weight.T).abs() <= 4 * (columns // 32 + 2) * EPSILON * magnitude + 1e-30).all()


@pytest.mark.parametrize("name", ["W8A8", "W8G32", "W4A8"])
def test_int8_formats_have_the_same_bits_on_every_instruction_set(native: object, isa: str, name: str) -> None:
    linear = make(name, random(97, 608), random(97)).linear
    x = random(53, 608, seed=1)
    y = apply(linear, x)
    native.set_isa("portable")  # type: ignore[attr-defined]  # a compiled module
    assert torch.equal(y, apply(linear, x))


def of_levels(name: str, levels: Tensor) -> NativeLinear:
    """Integers `[out, 32]` as the weight itself: every scale is 1, every minimum 0."""
    ones = torch.ones(len(levels), 1)
    if name == "W8A8":
        return W8A8Linear.from_levels(levels.to(torch.int8), ones[:, 0].contiguous())
    if name == "W8G32":
        return W8G32Linear(packing.pack_w8g32(levels.to(torch.int8), ones.half()), levels.shape[0], levels.shape[1], None)
    low, high = levels.to(torch.uint8).chunk(2, dim=1)
    return W4A8Linear(packing.pack_w4a8(low | high << 4, ones.half(), 0 * ones.half()), levels.shape[0], levels.shape[1], None)


@pytest.mark.parametrize("name", ["W8A8", "W8G32", "W4A8"])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_the_greatest_products_of_a_group_do_not_saturate(isa: str, name: str, rows: int) -> None:
    least, greatest = (0, 15) if name == "W4A8" else (-128, 127)
    x = torch.where(random(rows, 32) < 0, -1.0, 1.0)  # levels are -127 and 127
    x[0], x[-1] = -1, 1
    levels = torch.where(random(40, 32, seed=1) < 0, least, greatest)
    levels[:2] = torch.tensor([[least], [greatest]])
    levels[2 : 2 + rows] = torch.where(x[:38] > 0, greatest, least)
    error = apply(of_levels(name, levels), x).double() - x.double() @ levels.double().T
    assert error.abs().max() < 1e-3  # a level that saturates is 1 / 127


@pytest.mark.parametrize("name", FORMATS)
def test_output_rows_may_lie_apart_and_add_up(isa: str, name: str) -> None:
    linear = make(name, random(45, 96), random(45)).linear
    x = random(21, 96, seed=1)
    activations = Activations(KINDS[name], 21, 96).fill(x)
    wide = random(21, 64, seed=2)
    before = wide.clone()
    multiply(linear, activations, wide[:, 8:53], accumulate=True)
    assert torch.equal(wide[:, 8:53], before[:, 8:53] + apply(linear, x))
    assert torch.equal(wide[:, :8], before[:, :8]) and torch.equal(wide[:, 53:], before[:, 53:])
    multiply(linear, activations, wide[:, 8:53])
    assert torch.equal(wide[:, 8:53], apply(linear, x))


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_stays_in_its_row(isa: str, name: str) -> None:
    linear = make(name, random(33, 64)).linear
    x = random(20, 64, seed=1)
    clean = apply(linear, x)
    x[7, 40] = torch.nan
    y = apply(linear, x)
    assert y[7].isnan().all()
    assert torch.equal(y[:7], clean[:7]) and torch.equal(y[8:], clean[8:])


def test_zero_rows_and_zeros(isa: str) -> None:
    for name in FORMATS:
        linear = make(name, random(33, 64)).linear
        assert apply(linear, torch.empty(0, 64)).shape == (0, 33)
        assert not apply(linear, torch.zeros(3, 64)).any()


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        W4A8Linear.from_float(random(8, 48))
    with pytest.raises(ValueError, match="bias: "):
        W4A8Linear.from_float(random(8, 64), random(9))
    with pytest.raises(ValueError, match="levels: "):
        W8A8Linear.from_levels(random(8, 64), random(8))
    with pytest.raises(ValueError, match="scales: "):
        W8A8Linear.from_levels(random(8, 64).to(torch.int8), random(9))
    with pytest.raises(ValueError, match="panels: "):
        W8A8Linear(torch.zeros(64, dtype=torch.uint8), 33, 64, None)
    panels = packing.pack_bf16(random(33, 64).bfloat16())
    with pytest.raises(ValueError, match="64 bytes"):
        Bf16Linear(torch.cat([panels.new_zeros(128), panels])[_offset(panels) :][: panels.numel()], 33, 64, None)


def _offset(panels: Tensor) -> int:
    """Into a copy with 128 bytes before it: wherever that lies, one of these starts is off the 64-byte grid."""
    return 127 if panels.data_ptr() % 64 == 0 else 128
