"""Where a checkpoint's tensors come from, under their Hugging Face names whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from cluster.engine.gguf_weights import GgufBlocks, GgufWeights
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig, weight_files


class Weights(Protocol):
    """Tensors by name, read one at a time: a model larger than half the memory can be loaded and quantized."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""

    def get(self, name: str) -> Tensor:
        """A tensor in a float dtype.

        Raises:
            ConfigError: there is none, or its values cannot be read.
        """

    def blocks(self, name: str) -> GgufBlocks | None:
        """A tensor as the file holds it, where that is in blocks of few bits; else None."""


@dataclass(frozen=True, slots=True)
class FusedWeight:
    """Weights that share their input, stacked: one linear."""

    weights: Weights
    parts: dict[str, int]  # tensor name → out_features
    in_features: int

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())

    def floats(self) -> Tensor:
        """`[out_features, in_features]` in a float dtype.

        Raises:
            ConfigError: a tensor is missing, or its shape contradicts `config.json`.
        """
        return torch.cat([get_shaped(self.weights, name, (size, self.in_features)) for name, size in self.parts.items()])

    def blocks(self) -> GgufBlocks | None:
        """The file's own blocks, uint8 `[out_features, bytes]`; None where the parts have none, or of several kinds.

        Raises:
            ConfigError: as `floats`.
        """
        found = [blocks for name in self.parts if (blocks := self.weights.blocks(name)) is not None]
        if len(found) != len(self.parts) or len({blocks.kind for blocks in found}) != 1:
            return None
        for (name, size), blocks in zip(self.parts.items(), found, strict=True):
            _check_shape(name, (len(blocks.data), blocks.num_columns), (size, self.in_features))
        return GgufBlocks(found[0].kind, torch.cat([blocks.data for blocks in found]))


class SafetensorsWeights:
    """One or many safetensors files."""

    def __init__(self, files: list[Path]) -> None:
        opened: list[Any] = [safe_open(path, framework="pt") for path in files]
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # not a mapping

    def has(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ConfigError(f"model: the weights have no tensor {name}", param="model")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ConfigError(f"model: tensor {name} is {tensor.dtype}, expected floats", param="model")
        return tensor

    def blocks(self, name: str) -> None:
        """Always None."""


def open_weights(folder: Path, config: ModelConfig) -> Weights:
    """The folder's weights.

    Raises:
        ConfigError: there are none, or a file cannot be read.
    """
    files = weight_files(folder)
    try:
        if files[0].suffix == ".gguf":
            return GgufWeights(files[0], config)
        return SafetensorsWeights(files)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model: cannot read the weights in {folder}: {error}", param="model") from error


def lm_head_name(weights: Weights, config: ModelConfig) -> str:
    """The tensor that projects to the vocabulary. Some checkpoints tie it to the embedding without saying so: they lack their own."""
    is_tied = config.tie_word_embeddings or not weights.has("lm_head.weight")
    return "model.embed_tokens.weight" if is_tied else "lm_head.weight"


def get_shaped(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that must have `shape`.

    Raises:
        ConfigError: there is none, or its shape contradicts `config.json`.
    """
    tensor = weights.get(name)
    _check_shape(name, tuple(tensor.shape), shape)
    return tensor


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ConfigError(f"model: tensor {name} is {found}, config.json says {expected}", param="model")
