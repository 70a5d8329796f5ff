"""A GGUF file becomes safetensors that Baton's loader and `transformers` read as the same model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.comparison.export import export_safetensors
from cluster.engine.weights import open_weights
from cluster.model_config import ModelConfig
from tests.engine.test_gguf_weights import tensors_of, write_gguf
from tests.tiny_models import VOCAB_SIZE, oracle, tiny_model


@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("llama-bias", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_the_files_own(tmp_path: Path, family: str, arch: str, dtype: torch.dtype) -> None:
    source, target = _folders(tmp_path, family, arch, "Q4_1")
    export_safetensors(source, target, dtype)
    before, after = (open_weights(folder, ModelConfig.load(folder)) for folder in (source, target))
    names = list(tensors_of(family))
    assert all(torch.equal(after.get(name), before.get(name).to(dtype)) for name in names)
    assert after.has("lm_head.weight") == before.has("lm_head.weight")
    assert ModelConfig.load(source) == ModelConfig.load(target)


@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_transformers_computes_the_models_logits_from_it(tmp_path: Path, family: str, arch: str) -> None:
    """From a file in float32, so that they are the model's own."""
    source, target = _folders(tmp_path, family, arch, "F32")
    export_safetensors(source, target, torch.float32)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    ids = torch.arange(40).unsqueeze(0) * 7 % VOCAB_SIZE
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, oracle(family)(ids).logits)


def _folders(root: Path, family: str, arch: str, kind: str) -> tuple[Path, Path]:
    source, target = root / "source", root / "target"
    source.mkdir()
    target.mkdir()
    write_gguf(source, family, arch, kind)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model(family) / name, source)
    return source, target
