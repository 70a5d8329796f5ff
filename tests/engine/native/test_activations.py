"""Quantized rows and the operations fused before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.native.activations import Activations, Kind
from tests.engine.native.formats import random

KINDS: tuple[Kind, ...] = ("TOKEN_INT8", "GROUP_INT8", "BF16")
pytestmark = pytest.mark.usefixtures("native")


def values(activations: Activations) -> Tensor:
    """float64 `[rows, columns]`."""
    levels = activations.levels().double()
    match activations.kind.name:
        case "TOKEN_INT8":
            return levels * activations.scales().double()[:, None]
        case "GROUP_INT8":
            return levels * activations.scales().double().repeat_interleave(32, dim=1)
    return levels


def step(activations: Activations, x: Tensor) -> Tensor:
    """The distance of neighbouring values of the grid at each of `x`."""
    match activations.kind.name:
        case "TOKEN_INT8":
            return activations.scales().double()[:, None].expand_as(x)
        case "GROUP_INT8":
            return activations.scales().double().repeat_interleave(32, dim=1)
    return x.double().abs() * 2.0**-7


@pytest.mark.parametrize("columns", [32, 96, 576])
def test_int8_levels(isa: str, columns: int) -> None:
    x = random(37, columns) * torch.logspace(-20, 20, 37)[:, None]
    for kind, size in (("TOKEN_INT8", columns), ("GROUP_INT8", 32)):
        activations = Activations(kind, 37, columns).fill(x)  # type: ignore[arg-type]  # both are a Kind
        groups = torch.unflatten(x, 1, (-1, size))
        greatest = groups.abs().amax(dim=2, keepdim=True)
        levels = (groups * (127 / greatest)).round().flatten(1)
        assert torch.equal(activations.levels().float(), levels)
        assert torch.equal(activations.scales().reshape(37, -1), (greatest / 127).squeeze(2))


def test_bf16_rounds_as_torch_does(isa: str) -> None:
    x = torch.cat([random(5, 64), torch.tensor([[0.0, -0.0, 1.00390625, 1.01171875, torch.inf, -torch.inf, 3e38, 1e-30] * 8])])
    assert torch.equal(Activations("BF16", 6, 64).fill(x).levels(), x.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm_is_fused(isa: str, kind: Kind) -> None:
    x, weight = random(21, 576) * torch.logspace(-3, 3, 21)[:, None], random(576, seed=1)
    expected = F.rms_norm(x.double(), (576,), weight.double(), 1e-5)
    activations = Activations(kind, 21, 576).fill_rms_norm(x, weight, 1e-5)
    assert ((values(activations) - expected).abs() <= 0.501 * step(activations, expected) + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_silu_mul_is_fused(isa: str, kind: Kind) -> None:
    gate_up = random(21, 2 * 96) * torch.logspace(-3, 2, 21)[:, None]
    gate, up = gate_up.double().chunk(2, dim=1)
    activations = Activations(kind, 21, 96).fill_silu_mul(gate_up)
    expected = F.silu(gate) * up
    # Below the least normal float the exponential is held, and the true value is nothing beside any other.
    assert ((values(activations) - expected).abs() <= 0.501 * step(activations, expected) + 1e-30).all()


def test_silu_of_extreme_gates(isa: str) -> None:
    gates = torch.tensor([0.0, -0.0, 1e-20, 87.0, 89.0, 1000.0, 3e38, -87.0, -1000.0, -3e38] * 16)[:160][None]
    activations = Activations("BF16", 1, 160).fill_silu_mul(torch.cat([gates, torch.ones(1, 160)], dim=1))
    assert torch.allclose(activations.levels().float(), F.silu(gates.double()).float(), rtol=2.0**-7, atol=4.0)
    assert not activations.levels()[0, :6].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prologue", ["plain", "rms_norm", "silu_mul"])
def test_a_row_is_alone(isa: str, num_threads: int, kind: Kind, prologue: str) -> None:
    x, weight = random(43, 192), random(96, seed=1)

    def fill(rows: Tensor) -> Activations:
        activations = Activations(kind, len(rows), 96)
        match prologue:
            case "plain":
                return activations.fill(rows[:, :96])
            case "rms_norm":
                return activations.fill_rms_norm(rows[:, :96], weight, 1e-6)
        return activations.fill_silu_mul(rows)

    whole = fill(x)
    for first, last in ((0, 1), (7, 8), (3, 20), (42, 43)):
        part = fill(x[first:last])
        assert torch.equal(part.levels(), whole.levels()[first:last])
        assert kind == "BF16" or torch.equal(part.scales(), whole.scales()[first:last])


def test_what_does_not_fit_is_named() -> None:
    activations = Activations("BF16", 2, 64)
    with pytest.raises(ValueError, match="x: "):
        activations.fill(random(2, 32))
    with pytest.raises(ValueError, match="weight: "):
        activations.fill_rms_norm(random(2, 64), random(63), 1e-5)
    with pytest.raises(ValueError, match="gate_up: "):
        activations.fill_silu_mul(random(2, 64))
