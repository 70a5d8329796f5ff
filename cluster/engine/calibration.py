"""Measures how large a model's activations get on a text, and makes the smoothing factors of it.

The text runs through one layer after the other, so that only one layer's weights are in memory. Everything is computed in float64 and
the factors are rounded to 8 bits: sums in another order then make the same factors, and machines that calibrate the same model agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.engine.rope import inverse_frequencies
from cluster.engine.smoothing import LayerFactors, Smoothing
from cluster.engine.weights import Weights, get_shaped, lm_head_name, open_weights
from cluster.model_config import ModelConfig

_ALPHAS: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # shares of the outliers that go from activations into weights
_NUM_TOKENS: Final = 128  # of the text, about, and
_NUM_ROWS: Final = 256  # of a weight, which candidates are compared on
_FIRST_TOKEN: Final = 0.1  # share of its error beside the mean of all: attention rests on it, and its activations are unlike any others
_SMALLEST: Final = 1e-4  # of the largest: what a channel counts at least, so that one the text never used gets no huge factor
_FACTOR_BITS: Final = 8


@torch.inference_mode()
def calibrate(folder: Path, token_ids: Sequence[int], on_layer: Callable[[int, int], None] = lambda done, total: None) -> Smoothing:
    """The smoothing factors of a model: seconds for small models, minutes for large ones.

    Args:
        folder: `config.json` and the weights.
        token_ids: an ordinary text.
        on_layer: gets the number of layers done and that of all.

    Raises:
        ConfigError: something of the folder cannot be read; names it.
    """
    config = ModelConfig.load(folder)
    weights = open_weights(folder, config)
    embedding = get_shaped(weights, "model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    hidden = embedding[torch.tensor(token_ids)].double()
    run = _LayerRun(config, weights, len(token_ids))
    layers = []
    for layer in range(config.num_layers):
        layers.append(run(hidden, layer))
        on_layer(layer + 1, config.num_layers)
    norm = get_shaped(weights, "model.norm.weight", (config.hidden_size,))
    head = get_shaped(weights, lm_head_name(weights, config), (config.vocab_size, config.hidden_size))
    return Smoothing(layers, _factors(_rms_norm(hidden, norm, config.rms_norm_eps), head))


class _LayerRun:
    """Runs layers over a text and takes the factors of each on the way."""

    def __init__(self, config: ModelConfig, weights: Weights, num_tokens: int) -> None:
        self._config = config
        self._weights = weights
        positions = torch.arange(num_tokens, dtype=torch.float64)
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim, torch.float64))
        self._cos, self._sin = angles.cos(), angles.sin()
        self._distances = positions[:, None] - positions

    def __call__(self, hidden: Tensor, layer: int) -> LayerFactors:
        """Adds the layer's outputs to `hidden`, float64 `[num_tokens, hidden_size]`, in place."""
        prefix, config = f"model.layers.{layer}", self._config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        attention_norm = self._get(f"{prefix}.input_layernorm.weight", config.hidden_size)
        mlp_norm = self._get(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)

        x = _rms_norm(hidden, attention_norm, config.rms_norm_eps)
        kv_size = config.num_kv_heads * config.head_dim
        q_weight, q = self._linear(f"{attention}.q_proj", x, config.num_heads * config.head_dim, has_bias=config.qkv_bias)
        k_weight, k = self._linear(f"{attention}.k_proj", x, kv_size, has_bias=config.qkv_bias)
        v_weight, v = self._linear(f"{attention}.v_proj", x, kv_size, has_bias=config.qkv_bias)
        qkv = _factors(x, torch.cat([q_weight, k_weight, v_weight]))
        x = self._attend(attention, q, k, v, config.sliding_windows[layer])
        _, y = self._linear(f"{attention}.o_proj", x, config.hidden_size, has_bias=config.output_bias)
        hidden += y

        x = _rms_norm(hidden, mlp_norm, config.rms_norm_eps)
        gate_weight, gate = self._linear(f"{mlp}.gate_proj", x, config.intermediate_size, has_bias=config.mlp_bias)
        up_weight, up = self._linear(f"{mlp}.up_proj", x, config.intermediate_size, has_bias=config.mlp_bias)
        gate_up = _factors(x, torch.cat([gate_weight, up_weight]))
        x = F.silu(gate) * up
        weight, y = self._linear(f"{mlp}.down_proj", x, config.hidden_size, has_bias=config.mlp_bias)
        hidden += y
        return LayerFactors(qkv, gate_up, _factors(x, weight))

    def _get(self, name: str, *shape: int) -> Tensor:
        return get_shaped(self._weights, name, shape).double()

    def _linear(self, name: str, x: Tensor, out_features: int, *, has_bias: bool) -> tuple[Tensor, Tensor]:
        """The weight and the product."""
        weight = self._get(f"{name}.weight", out_features, x.shape[1])
        return weight, F.linear(x, weight, self._get(f"{name}.bias", out_features) if has_bias else None)

    def _attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        queries, keys, values = (self._heads(x) for x in (q, k, v))
        if self._config.qk_norm:
            head_dim, eps = self._config.head_dim, self._config.rms_norm_eps
            queries = _rms_norm(queries, self._get(f"{name}.q_norm.weight", head_dim), eps)
            keys = _rms_norm(keys, self._get(f"{name}.k_norm.weight", head_dim), eps)
        is_seen = (self._distances >= 0) & (self._distances < (window or len(self._distances)))
        attended = F.scaled_dot_product_attention(self._rotate(queries), self._rotate(keys), values, is_seen, enable_gqa=True)
        return attended.transpose(0, 1).flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        """`[num_tokens, num_heads * head_dim]` → `[num_heads, num_tokens, head_dim]`."""
        return torch.unflatten(x, 1, (-1, self._config.head_dim)).transpose(0, 1)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * self._cos - second * self._sin, second * self._cos + first * self._sin], -1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _factors(x: Tensor, weight: Tensor) -> Tensor:
    """Those, of a few candidates, with which int8 comes nearest to the product; their geometric mean is about 1.

    SmoothQuant's own are max|x|^a / max|w|^(1 - a) of an input channel, with one a for all linears. Here each linear has the best of
    several, and the root of the mean square is tried in the place of max|x|: what a few tokens have need not burden all others.

    Args:
        x: float64 `[num_tokens, in_features]`.
        weight: of any float dtype, `[out_features, in_features]`.

    Returns:
        float32 `[in_features]`.
    """
    sample, rows = _sampled(x, _NUM_TOKENS), _sampled(weight, _NUM_ROWS).double()
    exact = sample @ rows.t()
    sizes = exact.square().sum(1).clamp_min(1e-30)

    def error(factors: Tensor) -> float:
        by_token = (_to_int8(sample / factors) @ _to_int8(rows * factors).t() - exact).square().sum(1) / sizes
        return float(by_token.mean() + _FIRST_TOKEN * by_token[0])

    by_weight = _log2(weight.abs().amax(0).double())
    by_input = [_log2(size) for size in (x.abs().amax(0), x.square().mean(0).sqrt())]
    candidates = [_rounded(alpha * size - (1 - alpha) * by_weight) for size in by_input for alpha in _ALPHAS]
    return min(candidates, key=error).float()


def _sampled(x: Tensor, num_rows: int) -> Tensor:
    return x[:: max(1, len(x) // num_rows)]


def _to_int8(x: Tensor) -> Tensor:
    """As the scheme rounds it, with one scale a row."""
    scales = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scales).round() * scales


def _log2(size: Tensor) -> Tensor:
    return size.clamp_min(float(size.max()) * _SMALLEST).clamp_min(1e-30).log2()


def _rounded(log2_factors: Tensor) -> Tensor:
    mantissas, exponents = torch.frexp(torch.exp2(log2_factors - log2_factors.mean()))
    step = 2**_FACTOR_BITS
    return torch.ldexp((mantissas * step).round() / step, exponents)
