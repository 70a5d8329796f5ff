"""From a checkpoint's folder to a `Model` that is ready to run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine.kernel_choice import choose_kernels
from cluster.engine.kernels import KernelSet
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.model import Model
from cluster.engine.quantization import Int8Scheme, embedding_dtype
from cluster.engine.rope import RotaryTable
from cluster.engine.smoothing import SmoothedWeights, Smoothing
from cluster.engine.weights import FusedWeight, Weights, get_shaped, lm_head_name, open_weights
from cluster.errors import ConfigError
from cluster.kv_layout import KVLayout
from cluster.model_config import SMOOTHING_FILE, ModelConfig, checkpoint_fingerprint

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model and the names that its KV blocks travel under."""

    model: Model
    kernels: KernelSet[Any]
    layout: KVLayout
    checkpoint: str  # fingerprint of the folder
    domain: str  # numerics domain: scheme, KV dtype, kernel set
    max_model_len: int

    def make_cache(self, storage: Tensor) -> KVCache:
        """The KV pool over uint8 `[num_blocks, block_bytes]`.

        Raises:
            ConfigError: the kernels do not know the layout.
        """
        return self.kernels.make_cache(self.layout, storage)


def build_model(config: EngineConfig, folder: Path, max_model_len: int | None = None, kernels: KernelSet[Any] | None = None) -> BuiltModel:
    """Loads and prepares the weights: seconds for small models, minutes for large ones.

    Args:
        config: scheme, KV dtype, kernels, threads and block size are used.
        folder: `config.json` and the weights.
        max_model_len: tokens of a sequence; None is the model's own limit.
        kernels: instead of those that the config names.

    Raises:
        ConfigError: something of the folder or the config cannot be served; names it.
    """
    started_s = time.monotonic()
    model_config = ModelConfig.load(folder)
    context = max_model_len or model_config.max_position_embeddings
    if context > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {context} is beyond the model's own {model_config.max_position_embeddings}", param="max_model_len"
        )
    kernels = kernels or choose_kernels(config, model_config)
    smoothing = _smoothing(config.scheme, folder, model_config)
    with torch.inference_mode():
        weights = open_weights(folder, model_config)
        lm_head = lm_head_name(weights, model_config)
        if smoothing is not None:
            weights = SmoothedWeights(weights, smoothing, model_config)
            lm_head = SmoothedWeights.lm_head
        model = _Builder(model_config, weights, config.scheme, kernels).build(context, lm_head)
    _LOG.info("loaded %s as %s on %s in %.1f s", folder.name, config.scheme, kernels.name, time.monotonic() - started_s)
    return BuiltModel(
        model=model,
        kernels=kernels,
        layout=kv_layout(config, model_config, kernels.packing),
        checkpoint=checkpoint_fingerprint(folder),
        domain=f"{config.scheme}{'' if smoothing is None else '-smoothed'}/{config.kv_dtype}/{kernels.name}",
        max_model_len=context,
    )


def _smoothing(scheme: str, folder: Path, model_config: ModelConfig) -> Smoothing | None:
    """Only whole rows with one scale need it: groups of 32 hardly suffer from outliers, floats do not at all."""
    if scheme != Int8Scheme.name:
        return None
    smoothing = Smoothing.load(folder, model_config)
    if smoothing is None:
        _LOG.warning(
            "%s has no %s: int8 serves it unsmoothed, with more loss; `baton pull` makes the file in the cache", folder, SMOOTHING_FILE
        )
    return smoothing


def kv_layout(config: EngineConfig, model_config: ModelConfig, packing: str) -> KVLayout:
    """Of the blocks that a pool of `config` has for this model."""
    return KVLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        packing=packing,
    )


class _Builder:
    """Reads tensors in the order of the layers, fuses and prepares them, and keeps none of the originals."""

    def __init__(self, config: ModelConfig, weights: Weights, scheme: str, kernels: KernelSet[Any]) -> None:
        self._config = config
        self._weights = weights
        self._scheme = scheme
        self._kernels = kernels

    def build(self, max_model_len: int, lm_head: str) -> Model:
        """`lm_head` names the projection's tensor."""
        config = self._config
        embedding = get_shaped(self._weights, "model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = [self._layer(layer) for layer in range(config.num_layers)]
        return Model(
            config,
            embedding=embedding.to(embedding_dtype(self._scheme)),
            decoder=self._kernels.make_decoder(layers, config, RotaryTable(config.rope, config.head_dim, max_model_len)),
            head=self._kernels.make_head(self._norm("model.norm", config.hidden_size), self._lm_head(lm_head), config),
        )

    def _lm_head(self, name: str) -> Any:
        weight = FusedWeight(self._weights, {name: self._config.vocab_size}, self._config.hidden_size)
        return self._kernels.make_lm_head(self._scheme, weight)

    def _layer(self, layer: int) -> LayerParts[Any]:
        config = self._config
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
        return LayerParts(
            attention_norm=self._norm(f"{prefix}.input_layernorm", config.hidden_size),
            qkv=self._linear(qkv, config.hidden_size, has_bias=config.qkv_bias),
            q_norm=self._norm(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            window=config.sliding_windows[layer],
            output=self._linear({f"{attention}.o_proj": config.hidden_size}, q_size, has_bias=config.output_bias),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
            gate_up=self._linear(gate_up, config.hidden_size, has_bias=config.mlp_bias),
            down=self._linear({f"{mlp}.down_proj": config.hidden_size}, config.intermediate_size, has_bias=config.mlp_bias),
        )

    def _linear(self, parts: dict[str, int], in_features: int, *, has_bias: bool) -> Any:
        """One linear of several stacked weights: names → out_features."""
        weight = FusedWeight(self._weights, {f"{name}.weight": size for name, size in parts.items()}, in_features)
        bias = torch.cat([get_shaped(self._weights, f"{name}.bias", (size,)) for name, size in parts.items()]) if has_bias else None
        return self._kernels.make_linear(self._scheme, weight, bias)

    def _norm(self, name: str, size: int) -> Tensor:
        return get_shaped(self._weights, f"{name}.weight", (size,)).float()
