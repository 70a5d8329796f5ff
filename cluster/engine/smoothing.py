"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): factors that move outliers from activations into weights before both are quantized.

A linear's input channel j is divided by s[j], its weights' column j is multiplied by it: the product is the same, but int8 steps are spent
more evenly. The division costs nothing at run time, because whatever makes the input is linear itself:

    input of      is divided in
    q, k, v       the norm before attention
    gate, up      the norm before the MLP
    down          the rows (and bias) of up
    lm_head       the last norm; tied or not, the embedding stays as it is

The attention's output projection has no factors: they would be divided in v, and the KV that an int8 worker hands over would be another
than what every other scheme computes and reads.

The factors come from a calibration (`calibration.py`) that is done once and kept with the model, since they are part of its numbers:
workers with other factors compute other tokens. `checkpoint_fingerprint` covers the file, so such workers refuse each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from cluster.engine.gguf_weights import GgufBlocks
from cluster.engine.weights import Weights, lm_head_name
from cluster.errors import ConfigError
from cluster.model_config import SMOOTHING_FILE, ModelConfig

_HEAD: Final = "head"


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """Of one layer's inputs: float32 vectors."""

    qkv: Tensor  # [hidden_size]
    gate_up: Tensor  # [hidden_size]
    down: Tensor  # [intermediate_size]


@dataclass(frozen=True, slots=True)
class Smoothing:
    """All factors of a model."""

    layers: Sequence[LayerFactors]
    head: Tensor  # float32 [hidden_size]

    def save(self, path: Path) -> None:
        """Writes a safetensors file. Equal factors make equal bytes."""
        tensors = {_HEAD: self.head}
        for index, layer in enumerate(self.layers):
            tensors |= {f"layers.{index}.{name}": getattr(layer, name) for name in LayerFactors.__slots__}
        path.write_bytes(save(tensors))

    @staticmethod
    def load(folder: Path, config: ModelConfig) -> Smoothing | None:
        """Those in a model's folder; None where it has none.

        Raises:
            ConfigError: for `model`: the file is damaged, or belongs to another model; names it.
        """
        path = folder / SMOOTHING_FILE
        try:
            tensors = load(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _bad(path, f"cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise _bad(path, f"is damaged ({error})") from error
        sizes = _sizes(config)
        for name in (*sizes, *sorted(tensors)):
            _check(path, name, tensors.get(name), sizes.get(name))
        layers = [
            LayerFactors(*(tensors[f"layers.{index}.{name}"] for name in LayerFactors.__slots__)) for index in range(config.num_layers)
        ]
        return Smoothing(layers, tensors[_HEAD])


def _sizes(config: ModelConfig) -> dict[str, int]:
    sizes = {
        "qkv": config.hidden_size,
        "gate_up": config.hidden_size,
        "down": config.intermediate_size,
    }
    layers = {f"layers.{index}.{name}": size for index in range(config.num_layers) for name, size in sizes.items()}
    return layers | {_HEAD: config.hidden_size}


def _check(path: Path, name: str, found: Tensor | None, size: int | None) -> None:
    if found is None or size is None:
        raise _bad(path, f"{'lacks' if found is None else 'has'} factors {name}, unlike the model's config.json")
    if found.shape != (size,) or found.dtype != torch.float32:
        raise _bad(path, f"has {found.dtype} {list(found.shape)} for {name}, the model wants {torch.float32} {[size]}")
    if not bool(((found > 0) & found.isfinite()).all()):
        raise _bad(path, f"has factors for {name} that are not positive")


def _bad(path: Path, what: str) -> ConfigError:
    return ConfigError(f"model: {path} {what}; remove it, and `baton pull` makes it anew", param="model")


@dataclass(frozen=True, slots=True)
class _Fold:
    """What happens to one tensor: rows (or elements, of a vector) are divided, columns multiplied."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def fits(self, tensor: Tensor) -> bool:
        """Whether the factors are as many as the tensor's rows and columns."""
        sizes = zip(tensor.shape, (self.rows, self.columns), strict=False)
        return tensor.ndim <= 2 and all(factors is None or len(factors) == size for size, factors in sizes)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Products of single floats only, so the bits are the same on every machine."""
        tensor = tensor.float()
        if self.columns is not None:
            tensor = tensor * self.columns
        if self.rows is not None:
            tensor = tensor / self.rows.view(-1, *[1] * (tensor.ndim - 1))
        return tensor


class SmoothedWeights:
    """See `Weights`: another checkpoint's, with factors folded in. It has an `lm_head` of its own even where the other ties it."""

    lm_head: Final = "lm_head.weight"

    def __init__(self, weights: Weights, smoothing: Smoothing, config: ModelConfig) -> None:
        self._weights = weights
        self._unscaled_head = lm_head_name(weights, config)
        self._folds = {"model.norm.weight": _Fold(rows=smoothing.head), self.lm_head: _Fold(columns=smoothing.head)}
        for index, factors in enumerate(smoothing.layers):
            self._folds |= _layer_folds(f"model.layers.{index}", factors)

    def has(self, name: str) -> bool:
        return name == self.lm_head or self._weights.has(name)

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(self._unscaled_head if name == self.lm_head else name)
        fold = self._folds.get(name)
        if fold is None or not fold.fits(tensor):  # whoever asks for a shape refuses another by name
            return tensor
        return fold(tensor)

    def blocks(self, name: str) -> GgufBlocks | None:
        """None for what has been scaled: its values are no longer the file's."""
        return None if name in self._folds else self._weights.blocks(name)


def _layer_folds(prefix: str, factors: LayerFactors) -> dict[str, _Fold]:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        f"{prefix}.input_layernorm.weight": _Fold(rows=factors.qkv),
        f"{attention}.q_proj.weight": _Fold(columns=factors.qkv),
        f"{attention}.k_proj.weight": _Fold(columns=factors.qkv),
        f"{attention}.v_proj.weight": _Fold(columns=factors.qkv),
        f"{prefix}.post_attention_layernorm.weight": _Fold(rows=factors.gate_up),
        f"{mlp}.gate_proj.weight": _Fold(columns=factors.gate_up),
        f"{mlp}.up_proj.weight": _Fold(rows=factors.down, columns=factors.gate_up),
        f"{mlp}.up_proj.bias": _Fold(rows=factors.down),
        f"{mlp}.down_proj.weight": _Fold(columns=factors.down),
    }
