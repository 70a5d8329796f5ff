"""Where a checkpoint's tensors come from, under their Hugging Face names whatever the file format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from cluster.engine.gguf_weights import GgufWeights
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


def get_shaped(weights: Weights, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that must have `shape`.

    Raises:
        ConfigError: there is none, or its shape contradicts `config.json`.
    """
    tensor = weights.get(name)
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"model: tensor {name} is {tuple(tensor.shape)}, config.json says {shape}", param="model")
    return tensor
