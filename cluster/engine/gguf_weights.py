"""Weights from a GGUF file: llama.cpp's names, quantized blocks and head order turned back into Hugging Face's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

from cluster.engine.gguf_tensors import GgufTensors
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig

_TOP_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_TENSOR: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A quantized matrix as the file holds it."""

    kind: str  # gguf's name of the block format, as Q4_1
    data: Tensor  # uint8 [out_features, bytes of a row]


class GgufWeights:
    """One GGUF file, mapped into memory; a tensor is dequantized to float32 when it is asked for."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        reader = GgufTensors(path)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self._config = config
        # llama.cpp reorders the rows of q and k in this architecture alone: it rotates neighbours, Hugging Face rotates halves.
        self._has_paired_heads = reader.fields["general.architecture"].contents() == "llama"

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def get(self, name: str) -> Tensor:
        """See `Weights.get`; float32.

        Raises:
            ConfigError: there is no such tensor, or its quantization has no decoder.
        """
        tensor = self._tensors.get(gguf_name(name))
        if tensor is None:
            raise ConfigError(f"model: the GGUF file has no tensor {gguf_name(name)}", param="model")
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(f"model: tensor {tensor.name}: {tensor.tensor_type.name} cannot be read", param="model") from error
        # The copy detaches the result from the file, whose pages are read-only.
        result = torch.from_numpy(np.array(values, dtype=np.float32))
        return self._unpaired(name, result) if self._has_paired_heads else result

    def blocks(self, name: str) -> GgufBlocks | None:
        """See `Weights.blocks`."""
        tensor = self._tensors.get(gguf_name(name))
        if tensor is None or gguf.GGML_QUANT_SIZES[tensor.tensor_type][0] == 1 or tensor.data.ndim != 2:  # one value a block: floats
            return None
        data = torch.from_numpy(np.array(tensor.data))
        return GgufBlocks(tensor.tensor_type.name, self._unpaired(name, data) if self._has_paired_heads else data)

    def _unpaired(self, name: str, tensor: Tensor) -> Tensor:
        if ".q_proj." in name:
            return _split_pairs(tensor, self._config.num_heads)
        if ".k_proj." in name:
            return _split_pairs(tensor, self._config.num_kv_heads)
        return tensor


def gguf_name(name: str) -> str:
    """llama.cpp's name for a tensor's Hugging Face name; the name itself where it has none."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return _TOP_NAMES.get(name, name)
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"


def _split_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (0, n/2), (1, n/2 + 1), … back to 0, 1, …"""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
