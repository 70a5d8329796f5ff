"""Which kernel set serves a pool: the one that the config names, or what can stand in for it on this machine."""

from __future__ import annotations

import logging
from typing import Any, Final

from cluster.config import EngineConfig
from cluster.engine.kernels import KernelSet
from cluster.engine.native.build import load_kernels
from cluster.engine.native.kernels import NativeKernels, why_unfit
from cluster.engine.operations import make_operations
from cluster.engine.operations.kernels import OperationsKernels
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig

_LOG: Final = logging.getLogger(__name__)


def choose_kernels(config: EngineConfig, model_config: ModelConfig) -> KernelSet[Any]:
    """The kernel set for a model under a config.

    Raises:
        ConfigError: for `kv_dtype`, when only native kernels have it and this machine or model cannot have those.
    """
    if config.kernels != "native":
        return OperationsKernels(make_operations(config.kernels))
    if config.scheme == "float32":  # the oracle is torch's
        return OperationsKernels(make_operations("torch"))
    reason = why_unfit(model_config, config.block_size)
    if reason is not None:
        _LOG.warning("no native kernels for this model: %s; torch's serve instead, slower", reason)
    native = load_kernels() if reason is None else None
    if native is not None:
        return NativeKernels(native, config.threads)
    if config.kv_dtype == "int8":
        raise ConfigError(f"kv_dtype: int8 needs native kernels: {reason or 'this machine has none, the log says why'}", param="kv_dtype")
    return OperationsKernels(make_operations("torch"))
