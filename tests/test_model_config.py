from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.rope import RotaryTable, inverse_frequencies
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig, checkpoint_fingerprint, weight_files
from tests.tiny_models import FAMILIES, oracle, tiny_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def load(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_agrees_with_transformers(family: str) -> None:
    ours, theirs = ModelConfig.load(tiny_model(family)), oracle(family).config
    assert ours.architecture == theirs.architectures[0]
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    attention = oracle(family).model.layers[-1].self_attn
    assert ours.head_dim == attention.head_dim
    assert ours.qkv_bias == (attention.q_proj.bias is not None) and ours.output_bias == (attention.o_proj.bias is not None)
    assert ours.sliding_windows[-1] == getattr(attention, "sliding_window", getattr(theirs, "sliding_window", None))
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), oracle(family).model.rotary_emb.inv_freq)


def test_old_spelling_of_rope(tmp_path: Path) -> None:
    config = load(tmp_path, rope_theta=500_000.0, rope_scaling={"type": "linear", "factor": 4.0})
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (500_000.0, "linear", 4.0)
    positions = torch.tensor([0, 3])
    cos, _ = RotaryTable(config.rope, 16, 10).at(positions)
    plain, _ = RotaryTable(load(tmp_path, rope_theta=500_000.0).rope, 16, 10).at(positions)
    assert cos.shape == (2, 1, 1, 8) and not torch.equal(cos[1], plain[1]) and torch.equal(cos[0], plain[0])


def test_defaults_of_old_configs(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10_000.0)
    assert config.eos_token_ids == () and not config.tie_word_embeddings


def test_every_eos_counts(tmp_path: Path) -> None:
    assert load(tmp_path, {"eos_token_id": [7, 2]}, eos_token_id=2).eos_token_ids == (7, 2)
    assert load(tmp_path, {}, eos_token_id=[3, 4]).eos_token_ids == (3, 4)


def test_sliding_windows(tmp_path: Path) -> None:
    mistral, qwen = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    assert load(tmp_path, architectures=mistral, sliding_window=8).sliding_windows == (8, 8)
    assert load(tmp_path, architectures=qwen, sliding_window=8, max_window_layers=1).sliding_windows == (None, None)
    on: dict[str, Any] = {"architectures": qwen, "sliding_window": 8, "use_sliding_window": True}
    assert load(tmp_path, **on, max_window_layers=1).sliding_windows == (None, 8)
    assert load(tmp_path, **on, layer_types=["sliding_attention", "full_attention"]).sliding_windows == (8, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; known are LlamaForCausalLM, Mistral"),
        ({"architectures": None}, r"\(none\) is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: type yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"vocab_size": 0}, "vocab_size: must be a positive integer"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **changes)


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        ModelConfig.load(tmp_path)
    with pytest.raises(ConfigError, match="no weights"):
        weight_files(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="2 GGUF files"):
        weight_files(tmp_path)


def test_fingerprint_differs_with_the_model(tmp_path: Path) -> None:
    load(tmp_path)
    weights = tmp_path / "model.safetensors"
    size = 40 * 2**20
    weights.write_bytes(bytes(size))
    seen = {checkpoint_fingerprint(tmp_path)}
    assert checkpoint_fingerprint(tmp_path) in seen
    for offset in (0, size // 2 - 2**15, size - 1):
        changed = bytearray(size)
        changed[offset : offset + 2**17] = b"x" * min(2**17, size - offset)  # a small tensor
        weights.write_bytes(changed)
        seen.add(checkpoint_fingerprint(tmp_path))
    weights.write_bytes(bytes(size + 1))
    seen.add(checkpoint_fingerprint(tmp_path))
    load(tmp_path, vocab_size=101)
    seen.add(checkpoint_fingerprint(tmp_path))
    weights.rename(tmp_path / "other.safetensors")
    seen.add(checkpoint_fingerprint(tmp_path))
    assert len(seen) == 7
    (tmp_path / "generation_config.json").write_text("{}")
    assert checkpoint_fingerprint(tmp_path) in seen
