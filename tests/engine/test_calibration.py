"""Factors from activations: those that `transformers` computes, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.calibration import calibrate
from cluster.engine.smoothing import Smoothing
from cluster.model_config import SMOOTHING_FILE, ModelConfig
from tests.tiny_models import FAMILIES, VOCAB_SIZE, oracle, tiny_model

TEXT = torch.randint(3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(2)).tolist()
LAYER_INPUTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "values": ("self_attn.o_proj",),
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


def expected(x: Tensor, weights: list[Tensor], config: ModelConfig, *, by_kv_head: bool) -> Tensor:
    """max|x|^0.5 / max|w|^0.5 of each input channel, with a geometric mean of 1; the first token does not count."""
    largest = [x[1:].abs().amax(0), torch.cat(weights).abs().amax(0)]
    if by_kv_head:
        largest = [part.view(config.num_kv_heads, -1, config.head_dim).amax(1).flatten() for part in largest]
    factors = (largest[0] / largest[1]).sqrt()
    return factors / factors.log().mean().exp()


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_are_those_of_transformers_activations(family: str) -> None:
    config, model = ModelConfig.load(tiny_model(family)), oracle(family)
    smoothing, inputs = calibrate(tiny_model(family), TEXT), inputs_of(model)
    modules = dict(model.named_modules())

    def check(found: Tensor, *names: str) -> None:
        weights = [modules[name].weight.detach() for name in names]
        by_kv_head = names[0].endswith("o_proj")
        assert torch.allclose(found, expected(inputs[names[0]], weights, config, by_kv_head=by_kv_head), rtol=1 / 200), names

    for index, layer in enumerate(smoothing.layers):
        for kind, names in LAYER_INPUTS.items():
            check(getattr(layer, kind), *(f"model.layers.{index}.{name}" for name in names))
    check(smoothing.head, "lm_head")


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
