"""GGUF files made from the tiny models in llama.cpp's own arrangement: they load as what was written, and as `transformers` loads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cluster.engine.gguf_weights import gguf_name
from cluster.engine.weights import FusedWeight, SafetensorsWeights, open_weights
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import oracle, tiny_model

Array = npt.NDArray[np.float32]
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def permute(weights: Array, num_heads: int) -> Array:
    """As llama.cpp's `convert_hf_to_gguf.py` does with q and k of Llama."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def tensors_of(family: str) -> dict[str, Array]:
    folder = tiny_model(family)
    weights = SafetensorsWeights(sorted(folder.glob("*.safetensors")))
    names = [name for name in oracle(family).state_dict() if weights.has(name)]
    return {name: weights.get(name).numpy() for name in names}


def write_gguf(folder: Path, family: str, arch: str, kind: str) -> None:
    config = ModelConfig.load(tiny_model(family))
    shutil.copy(tiny_model(family) / "config.json", folder)
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_embedding_length(config.hidden_size)
    for name, tensor in tensors_of(family).items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = permute(tensor, config.num_heads if "q_proj" in name else config.num_kv_heads)
        is_quantizable = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        tensor_type = gguf.GGMLQuantizationType[kind if is_quantizable else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", TYPES)
def test_values_and_head_order(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path, "llama", "llama", kind)
    weights = open_weights(tmp_path, ModelConfig.load(tmp_path))
    step = {"F32": 0.0, "F16": 2**-10, "BF16": 2**-8, "Q8_0": 1 / 127, "Q4_0": 1 / 7, "Q4_1": 1 / 14}[kind]
    for name, tensor in tensors_of("llama").items():
        assert np.abs(weights.get(name).numpy() - tensor).max() <= step * np.abs(tensor).max()
    assert not weights.has("lm_head.weight")


@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_bits_are_those_that_transformers_loads(tmp_path: Path, family: str, arch: str) -> None:
    write_gguf(tmp_path, family, arch, "Q4_1")
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(oracle(family).config)  # type: ignore[no-untyped-call]
    load: Any = load_gguf_checkpoint
    loaded = load(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=skeleton)["tensors"]
    weights = open_weights(tmp_path, ModelConfig.load(tmp_path))
    names = list(tensors_of(family))
    assert set(names) <= set(loaded)
    for name in names:
        assert torch.equal(weights.get(name), loaded[name].float()), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_fused_blocks_are_the_files_own(tmp_path: Path, kind: str) -> None:
    """Expanded, they are what the floats are; heads lie in the same order."""
    write_gguf(tmp_path, "llama", "llama", kind)
    config = ModelConfig.load(tmp_path)
    weights = open_weights(tmp_path, config)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = {f"model.layers.1.self_attn.{name}_proj.weight": size for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size))}
    fused = FusedWeight(weights, names, config.hidden_size)
    blocks = fused.blocks()
    assert blocks is not None and blocks.kind == kind
    expanded = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(expanded), fused.floats())


def test_floats_have_no_blocks(tmp_path: Path) -> None:
    write_gguf(tmp_path, "llama", "llama", "BF16")
    config = ModelConfig.load(tmp_path)
    name = {"model.layers.0.mlp.down_proj.weight": config.hidden_size}
    for weights in (open_weights(tmp_path, config), open_weights(tiny_model("llama"), config)):
        assert FusedWeight(weights, name, config.intermediate_size).blocks() is None


def test_int4_computes_with_the_files_own_4_bits(tmp_path: Path) -> None:
    """Weights on the file's grid lose nothing more: only the activations are rounded."""
    write_gguf(tmp_path, "llama", "llama", "Q4_1")
    exact, served = (ModelDrive(tmp_path, engine_config(scheme, block_size=16)) for scheme in ("float32", "int4"))
    prompt = list(range(40, 120))
    logits = [drive.logits([drive.sequence(prompt)], [len(prompt)]) for drive in (exact, served)]
    assert logits[0] is not None and logits[1] is not None
    assert (logits[0].log_softmax(-1) - logits[1].log_softmax(-1)).square().mean().sqrt() < 0.1


def test_a_model_from_gguf_generates_the_same(tmp_path: Path) -> None:
    write_gguf(tmp_path, "llama", "llama", "F32")
    prompt = list(range(40, 70))
    from_gguf, from_safetensors = (
        drive.generate([drive.sequence(prompt, max_tokens=20, num_logprobs=0)], chunk=16)
        for drive in (ModelDrive(folder, engine_config("float32")) for folder in (tmp_path, tiny_model("llama")))
    )
    assert from_gguf == from_safetensors


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path, "llama", "llama", "F16")
    weights = open_weights(tmp_path, ModelConfig.load(tmp_path))
    with pytest.raises(ConfigError, match=r"no tensor blk\.0\.attn_q\.bias"):
        weights.get("model.layers.0.self_attn.q_proj.bias")
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match="cannot read the weights"):
        open_weights(tmp_path, ModelConfig.load(tmp_path))
