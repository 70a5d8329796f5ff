"""What Baton reads beside the weights, made from a GGUF file's own metadata.

Every part of Baton takes a model as a folder in the Hugging Face style. A GGUF file carries the same facts under other names, so a
folder is made from it once: `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json`. The weights stay
in the GGUF file as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader

from cluster.errors import ConfigError
from deploy.gguf_tokenizer import build_tokenizer, end_token_ids, tokenizer_config

_ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}


def import_gguf(gguf: Path, folder: Path) -> None:
    """Writes the four JSON files for `gguf` into `folder`; files that are there already are kept.

    Raises:
        ConfigError: for `model`, when the file is not GGUF, or of an architecture or a vocabulary that Baton does not know.
    """
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{gguf} is not a GGUF file: {error}", param="model") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name for tensor in reader.tensors}
    try:
        _write_files(metadata, tensors, folder)
    except KeyError as error:
        raise ConfigError(f"{gguf} lacks the metadata key {error}", param="model") from error


def check_architecture(arch: str) -> None:
    """Raises:
    ConfigError: for `model`, when a GGUF file's `general.architecture` is one that Baton does not know.
    """
    if arch not in _ARCHITECTURES:
        raise ConfigError(f"unknown architecture {arch!r} in the GGUF file; known: {', '.join(_ARCHITECTURES)}", param="model")


def _write_files(metadata: Mapping[str, Any], tensors: set[str], folder: Path) -> None:
    config = model_config(metadata, tensors)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": end_token_ids(metadata), "pad_token_id": config["pad_token_id"]},
    )
    if not (folder / "tokenizer.json").exists():
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(metadata: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        metadata: the file's keys and values.
        tensors: the names of its tensors; what they lack or have says more than the keys (tied embeddings, biases).
    """
    arch = metadata["general.architecture"]
    check_architecture(arch)
    if metadata.get(f"{arch}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise ConfigError(
            "the GGUF file scales RoPE, which its metadata describes in part only; put its config.json beside it", param="model"
        )
    model_type, name = _ARCHITECTURES[arch]
    window = metadata.get(f"{arch}.attention.sliding_window")
    if arch == "llama" and window is not None:
        model_type, name = "mistral", "MistralForCausalLM"
    heads, hidden = metadata[f"{arch}.attention.head_count"], metadata[f"{arch}.embedding_length"]
    return {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": metadata[f"{arch}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{arch}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": metadata.get(f"{arch}.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata[f"{arch}.context_length"],
        "rms_norm_eps": _shortest(metadata[f"{arch}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    } | ({"sliding_window": window} if window is not None else {})


def _shortest(value: float) -> float:
    """The number that was meant: 1e-05 for the float32 9.999999747378752e-06."""
    return float(str(np.float32(value)))
