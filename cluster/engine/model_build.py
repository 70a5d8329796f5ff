"""From a checkpoint's folder to a `Model` that is ready to run."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.config import EngineConfig
from cluster.engine.layers import MLP, AttentionLayer, DecoderLayer, RMSNorm
from cluster.engine.model import Model
from cluster.engine.operations import Linear, Operations, make_operations
from cluster.engine.quantization import Scheme, make_scheme
from cluster.engine.rope import RotaryTable
from cluster.engine.weights import Weights, get_shaped, open_weights
from cluster.errors import ConfigError
from cluster.kv_ticket import KVLayout
from cluster.model_config import ModelConfig, checkpoint_fingerprint

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model and the names that its KV blocks travel under."""

    model: Model
    layout: KVLayout
    checkpoint: str  # fingerprint of the folder
    domain: str  # numerics domain: scheme, KV dtype, kernel set
    max_model_len: int


def build_model(config: EngineConfig, folder: Path, max_model_len: int | None = None) -> BuiltModel:
    """Loads and prepares the weights: seconds for small models, minutes for large ones.

    Args:
        config: scheme, KV dtype, kernels and block size are used.
        folder: `config.json` and the weights.
        max_model_len: tokens of a sequence; None is the model's own limit.

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
    operations = make_operations(config.kernels)
    with torch.inference_mode():
        model = _Builder(model_config, open_weights(folder, model_config), make_scheme(config.scheme), operations).build(context)
    _LOG.info("loaded %s as %s in %.1f s", folder.name, config.scheme, time.monotonic() - started_s)
    return BuiltModel(
        model=model,
        layout=kv_layout(config, model_config),
        checkpoint=checkpoint_fingerprint(folder),
        domain=f"{config.scheme}/{config.kv_dtype}/{operations.name}",
        max_model_len=context,
    )


def kv_layout(config: EngineConfig, model_config: ModelConfig) -> KVLayout:
    """The block bytes of a model under a config."""
    return KVLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
    )


class _Builder:
    """Reads tensors in the order of the layers, fuses and prepares them, and keeps none of the originals."""

    def __init__(self, config: ModelConfig, weights: Weights, scheme: Scheme, operations: Operations) -> None:
        self._config = config
        self._weights = weights
        self._scheme = scheme
        self._operations = operations

    def build(self, max_model_len: int) -> Model:
        config = self._config
        embedding = get_shaped(self._weights, "model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        return Model(
            config,
            embedding=embedding.to(self._scheme.embedding_dtype),
            layers=[self._layer(layer) for layer in range(config.num_layers)],
            norm=self._norm("model.norm", config.hidden_size),
            lm_head=self._lm_head(embedding),
            rotary=RotaryTable(config.rope, config.head_dim, max_model_len),
            operations=self._operations,
        )

    def _lm_head(self, embedding: Tensor) -> Linear:
        name = "lm_head.weight"
        # Some checkpoints tie without saying so: they simply lack the tensor.
        is_tied = self._config.tie_word_embeddings or not self._weights.has(name)
        weight = embedding if is_tied else get_shaped(self._weights, name, (self._config.vocab_size, self._config.hidden_size))
        return self._scheme.make_linear(weight, None, self._operations)

    def _layer(self, layer: int) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        hidden_size = self._config.hidden_size
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm", hidden_size),
            attention=self._attention(layer, f"{prefix}.self_attn"),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", hidden_size),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _attention(self, layer: int, prefix: str) -> AttentionLayer:
        config = self._config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        return AttentionLayer(
            layer=layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.sliding_windows[layer],
            qkv=self._linear(parts, config.hidden_size, has_bias=config.qkv_bias),
            output=self._linear({f"{prefix}.o_proj": config.hidden_size}, q_size, has_bias=config.output_bias),
            q_norm=self._norm(f"{prefix}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=self._norm(f"{prefix}.k_norm", config.head_dim) if config.qk_norm else None,
            operations=self._operations,
        )

    def _mlp(self, prefix: str) -> MLP:
        config = self._config
        parts = {f"{prefix}.gate_proj": config.intermediate_size, f"{prefix}.up_proj": config.intermediate_size}
        return MLP(
            gate_up=self._linear(parts, config.hidden_size, has_bias=config.mlp_bias),
            down=self._linear({f"{prefix}.down_proj": config.hidden_size}, config.intermediate_size, has_bias=config.mlp_bias),
            operations=self._operations,
        )

    def _linear(self, parts: dict[str, int], in_features: int, *, has_bias: bool) -> Linear:
        """One linear of several stacked weights: names → out_features."""
        weight = torch.cat([get_shaped(self._weights, f"{name}.weight", (size, in_features)) for name, size in parts.items()])
        bias = torch.cat([get_shaped(self._weights, f"{name}.bias", (size,)) for name, size in parts.items()]) if has_bias else None
        return self._scheme.make_linear(weight, bias, self._operations)

    def _norm(self, name: str, size: int) -> RMSNorm:
        weight = get_shaped(self._weights, f"{name}.weight", (size,)).float()
        return RMSNorm(weight, self._config.rms_norm_eps, self._operations)
