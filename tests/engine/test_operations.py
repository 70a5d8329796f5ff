"""The `cpu` operations compute what the `reference` ones say, and the schemes round as they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.operations import make_operations, quantize_rows
from cluster.engine.operations.cpu import has_byte_products
from cluster.engine.quantization import make_scheme, quantize_channels
from cluster.errors import ConfigError
from cluster.types import TokenOutput
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import FAMILIES, tiny_model

TORCH = make_operations("torch")
REFERENCE = make_operations("reference")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [1, 5, 64, 130])
@pytest.mark.parametrize(("scheme", "tolerance"), [("float32", 1e-5), ("bf16", 2**-7), ("int8", 1e-5)])
def test_linear(scheme: str, tolerance: float, num_rows: int) -> None:
    weight, bias, x = random(70, 96), random(70, seed=1), random(num_rows, 96, seed=2)
    ours = make_scheme(scheme).make_linear(weight, bias, TORCH)(x)
    theirs = make_scheme(scheme).make_linear(weight, bias, REFERENCE)(x)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("has_vnni", [True, False])
def test_int8_products_do_not_saturate(monkeypatch: pytest.MonkeyPatch, has_vnni: bool) -> None:
    """The greatest levels on both sides. A CPU with VNNI passes in both ways, one without in the second."""
    if has_vnni and not has_byte_products():
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr("cluster.engine.operations.cpu.has_byte_products", lambda: has_vnni)
    weight = torch.full((32, 128), 1.0)
    weight[1::2] = -1.0
    x = torch.ones(20, 128)
    x[::3] = -1.0
    linear, exact = make_scheme("int8").make_linear(weight, None, TORCH), x @ weight.t()
    torch.testing.assert_close(linear(x), exact, rtol=1e-6, atol=0)


def test_int8_linear_is_near_the_float_one() -> None:
    weight, x = random(200, 512), random(40, 512, seed=1)
    exact = x @ weight.t()
    error = make_scheme("int8").make_linear(weight, None, TORCH)(x) - exact
    assert (error.square().mean() / exact.square().mean()).sqrt() < 0.015


def test_int8_linears_need_few_kernels_whatever_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a compiled kernel for each number of rows: hundreds of MiB if every number were one."""
    kernel, counts = torch.ops.onednn.qlinear_pointwise.default, []

    def counting(levels: Tensor, *arguments: Any) -> Any:
        counts.append(levels.shape[0])
        return kernel(levels, *arguments)

    monkeypatch.setattr(torch.ops.onednn.qlinear_pointwise, "default", counting)
    linear = make_scheme("int8").make_linear(random(8, 32), None, TORCH)
    x = random(512, 32, seed=1)
    whole = linear(x)
    counts.clear()
    for num_rows in range(1, 513):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
    assert len(counts) == 512 * (1 if has_byte_products() else 2)
    assert len(set(counts)) == 16 + 31
    assert all(filled < num_rows + 16 for num_rows, filled in enumerate(counts, start=1))


def test_rows_are_quantized_to_half_a_step() -> None:
    x = torch.cat([random(20, 96), torch.zeros(1, 96), random(1, 96) * 1e-20, random(1, 96) * 1e20])
    levels, scales = quantize_rows(x)
    assert levels.dtype == torch.uint8 and scales.shape == (23, 1) and levels.min() >= 1
    restored = (levels.double() - 128) * scales.double()
    assert ((restored - x.double()).abs() <= scales.double() * 0.5001).all()
    assert (levels[:20].amax(dim=1).clamp_min(0) == 255).logical_or(levels[:20].amin(dim=1) == 1).all()


def test_channels_are_quantized_to_half_a_step() -> None:
    weight = torch.cat([random(20, 96), torch.zeros(1, 96)]).bfloat16()
    levels, scales = quantize_channels(weight)
    assert levels.dtype == torch.int8 and (levels[:20].abs().amax(dim=1) == 127).all() and not levels[20].any()
    assert ((levels.float() * scales[:, None] - weight.float()).abs() <= scales[:, None] * 0.501).all()


@pytest.mark.parametrize("shape", [(1, 96), (33, 100), (7, 3, 32)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape) * 5, random(shape[-1], seed=1)
    torch.testing.assert_close(TORCH.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_silu_and_mul_at_the_ends() -> None:
    x = torch.tensor([[-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(TORCH.silu_and_mul(x), REFERENCE.silu_and_mul(x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("scheme", ["bf16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_model(family: str, scheme: str) -> None:
    """Long enough for the sliding windows to cut, and over several blocks."""
    prompt = torch.randint(3, 500, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for kernels in ("native", "torch", "reference"):
        drive = ModelDrive(tiny_model(family), engine_config(scheme, kernels=kernels))
        found = drive.logits([drive.sequence(prompt)], [len(prompt)])
        assert found is not None
        logits.append(found.log_softmax(-1))
    # Roundings fall differently and move a logit by 0.05; a wrong mask, head or scale moves them by whole units.
    assert (logits[0] - logits[2]).square().mean().sqrt() < 0.2
    assert (logits[1] - logits[2]).square().mean().sqrt() < 0.2


def test_domains_name_what_decides_the_bits() -> None:
    def domain(scheme: str, kernels: str) -> str:
        return ModelDrive(tiny_model("llama"), engine_config(scheme, kernels=kernels)).built.domain

    torchs = {domain(scheme, "torch") for scheme in ("float32", "bf16", "int8")}
    assert len(torchs) == 3 and all(TORCH.name in name for name in torchs) and TORCH.name != REFERENCE.name
    assert domain("float32", "native") == domain("float32", "torch")
    assert domain("int8", "native") not in torchs


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="torch, reference"):
        make_operations("tpu")
    with pytest.raises(ConfigError, match="float32, bf16, int8"):
        make_scheme("int2")


def test_sampled_steps_answer_for_those_that_reach_their_end_alone() -> None:
    drive = ModelDrive(tiny_model("llama"), engine_config("int8"))
    sequences = [drive.sequence(range(10, 40), max_tokens=3), drive.sequence(range(10, 15), max_tokens=3)]
    assert drive.logits(sequences[:1], [20]) is None
    outputs = drive.generate(sequences, chunk=7)
    assert all(len(output) == 3 and isinstance(output[0], TokenOutput) for output in outputs)
