"""A model folder as peers read it: safetensors in one float dtype, `config.json`, tokenizer. GGUF blocks are dequantized.

The values are those that Baton computes with: the same head order, the same tied embedding. An int8 or bfloat16 peer then starts from
what a 4-bit file holds, so speed can be compared and answers need not differ for another reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from cluster.engine.weights import Weights, open_weights
from cluster.model_config import ModelConfig

_TOP: Final = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_PARTS: Final = (
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_COPIED: Final = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def export_safetensors(source: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `source`, a folder that Baton serves, into the empty folder `target`.

    Raises:
        ConfigError: `source` has no weights that Baton can read.
    """
    config = ModelConfig.load(source)
    weights = open_weights(source, config)
    tensors = {name: weights.get(name).to(dtype).contiguous() for name in _names(weights, config.num_layers)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED:
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def _names(weights: Weights, num_layers: int) -> Iterator[str]:
    parts = (f"model.layers.{layer}.{part}.{kind}" for layer in range(num_layers) for part in _PARTS for kind in ("weight", "bias"))
    return (name for name in (*_TOP, *parts) if weights.has(name))
