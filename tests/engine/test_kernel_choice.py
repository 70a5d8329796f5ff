"""Which kernels serve what, and what happens where the native ones cannot be had."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from cluster.config import EngineConfig
from cluster.engine import kernel_choice
from cluster.engine.kernel_choice import choose_kernels
from cluster.engine.native.kernels import NativeKernels, why_unfit
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig
from tests.tiny_models import tiny_model


def config(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate(fields)


@pytest.fixture
def model() -> ModelConfig:
    return ModelConfig.load(tiny_model("llama"))


@pytest.mark.usefixtures("native")
def test_the_native_kernels_are_the_default(model: ModelConfig) -> None:
    kernels = choose_kernels(config(), model)
    assert isinstance(kernels, NativeKernels)
    assert kernels.name.startswith("native-")


def test_the_oracle_is_torchs(model: ModelConfig) -> None:
    assert choose_kernels(config(scheme="float32", kv_dtype="float32"), model).name.startswith("torch-")
    assert choose_kernels(config(kernels="reference"), model).name == "reference"


def test_torch_stands_in_where_there_is_no_compiler(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "load_kernels", lambda: None)
    for scheme in ("bf16", "int8", "int4"):
        assert choose_kernels(config(scheme=scheme), model).name.startswith("torch-")
    with pytest.raises(ConfigError, match=r"^kv_dtype: int8 needs native kernels") as caught:
        choose_kernels(config(kv_dtype="int8"), model)
    assert caught.value.param == "kv_dtype"


def test_torch_stands_in_for_blocks_that_the_native_do_not_know(model: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(config(block_size=8), model).name.startswith("torch-")
    assert "block_size: 8 is none" in caplog.text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hidden_size", 100, "hidden_size is 100"),
        ("intermediate_size", 176, "intermediate_size is 176"),
        ("head_dim", 24, "head_dim"),
        ("head_dim", 272, "head_dim"),
        ("num_heads", 96, "heads share"),
    ],
)
def test_unfit_models_are_named(model: ModelConfig, field: str, value: int, said: str) -> None:
    assert why_unfit(model, 16) is None
    changes: dict[str, Any] = {field: value}
    found = why_unfit(replace(model, **changes), 16)
    assert found is not None and said in found
