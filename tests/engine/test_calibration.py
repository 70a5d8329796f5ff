"""Factors from activations: those that `transformers` computes, for every family."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.engine.calibration import calibrate
from cluster.engine.smoothing import Smoothing
from cluster.model_config import SMOOTHING_FILE, ModelConfig
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import FAMILIES, VOCAB_SIZE, oracle, tiny_model

TEXT = torch.randint(3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(2)).tolist()
LAYER_INPUTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def inputs_of(model: Any) -> dict[str, Tensor]:
    """What each linear gets when `transformers` runs the text, by the linear's name."""
    found: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        return lambda _module, arguments: found.update({name: arguments[0][0]})

    hooks = [m.register_forward_pre_hook(keeper(n)) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    with torch.inference_mode():
        model(torch.tensor([TEXT]))
    for hook in hooks:
        hook.remove()
    return found


def candidates(x: Tensor, weight: Tensor) -> list[Tensor]:
    """SmoothQuant's formula for several exponents, with max|x| and with the root of the mean square; a geometric mean of 1."""
    largest = weight.abs().amax(0)
    found = []
    for size in (x.abs().amax(0), x.square().mean(0).sqrt()):
        for alpha in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
            factors = size**alpha / largest ** (1 - alpha)
            found.append(factors / factors.log().mean().exp())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_are_those_of_transformers_activations(family: str) -> None:
    model = oracle(family)
    smoothing, inputs = calibrate(tiny_model(family), TEXT), inputs_of(model)
    modules = dict(model.named_modules())

    def check(found: Tensor, *names: str) -> None:
        weight = torch.cat([modules[name].weight.detach() for name in names])
        known = candidates(inputs[names[0]], weight)
        assert any(torch.allclose(found, factors, rtol=1 / 200) for factors in known), names

    for index, layer in enumerate(smoothing.layers):
        for kind, names in LAYER_INPUTS.items():
            check(getattr(layer, kind), *(f"model.layers.{index}.{name}" for name in names))
    check(smoothing.head, "lm_head")


def test_int8_comes_nearer_to_a_model_with_outliers(tmp_path: Path) -> None:
    """Some channels of the norms are made 30 times as large, and their weights as small: what large models have."""
    folder = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[5:9] *= 30
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            tensor[:, 5:9] /= 30
    save_file(tensors, folder / "model.safetensors")
    exact = logits(folder, "float32")
    unsmoothed = (logits(folder, "int8") - exact).square().mean()
    calibrate(folder, TEXT).save(folder / SMOOTHING_FILE)
    assert (logits(folder, "int8") - exact).square().mean() < unsmoothed / 10


def logits(folder: Path, scheme: str) -> Tensor:
    """After each of the text's last tokens."""
    drive = ModelDrive(folder, engine_config(scheme, kernels="reference"))
    found = drive.logits([drive.sequence(TEXT[:length]) for length in (60, 100, 140)], [60, 100, 140])
    assert found is not None
    return found


def test_the_same_file_comes_out_whatever_the_threads(tmp_path: Path) -> None:
    """Sums in another order, as on another machine: workers that calibrated apart must agree."""
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            calibrate(tiny_model(), TEXT).save(tmp_path / str(threads))
    finally:
        torch.set_num_threads(num_threads)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    smoothing = calibrate(tiny_model(), TEXT)
    smoothing.save(tmp_path / SMOOTHING_FILE)
    loaded = Smoothing.load(tmp_path, ModelConfig.load(tiny_model()))
    assert loaded is not None
    assert torch.equal(loaded.head, smoothing.head)
    assert [torch.equal(mine.down, its.down) for mine, its in zip(smoothing.layers, loaded.layers, strict=True)] == [True] * 3


def test_tells_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    calibrate(tiny_model(), TEXT, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
