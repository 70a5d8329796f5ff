"""The operations of a decoder and their implementations, one a device."""

from __future__ import annotations

from cluster.engine.operations.base import Attention, Linear, Operations, quantize_rows
from cluster.errors import ConfigError

__all__ = ["Attention", "Linear", "Operations", "make_operations", "quantize_rows"]


def make_operations(kernels: str) -> Operations:
    """The implementation that the config names.

    Raises:
        ConfigError: there is none of this name.
    """
    match kernels:
        case "reference":
            from cluster.engine.operations.reference import ReferenceOperations

            return ReferenceOperations()
        case "torch":
            from cluster.engine.operations.cpu import CpuOperations

            return CpuOperations()
    raise ConfigError(f"kernels: {kernels} is not supported; known are torch, reference", param="kernels")
