"""The planes that the tests run over, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pytest
import torch

from cluster.kv_transfer import nccl_library, nixl_library
from cluster.kv_transfer.base import DataPlane
from cluster.kv_transfer.grpc import GrpcPlane
from cluster.kv_transfer.in_process import Exchange, InProcessPlane
from cluster.kv_transfer.nccl import NcclPlane
from cluster.kv_transfer.nixl import NixlPlane
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.kv_transfer.shared_memory import SharedMemoryPlane
from tests.kv_transfer.socket_device import SocketDevice

HOST: Final = "127.0.0.1"
NEEDS_NIXL: Final = pytest.mark.skipif(not nixl_library.is_installed(), reason="the package nixl is not installed")

NAMES: Final = ("shared_memory", "nccl", "nixl", "grpc", "in_process")
ONE_SIDED: Final = ("shared_memory", "nixl", "in_process")
PLANES: Final = tuple(pytest.param(name, marks=NEEDS_NIXL if name == "nixl" else ()) for name in NAMES)


@dataclass(frozen=True)
class PlaneMaker:
    """What planes of one test share."""

    secret: str
    exchange: Exchange = field(default_factory=Exchange)

    def make(self, name: str, pool: torch.Tensor, incarnation: str, memory: PoolMemory | None = None) -> DataPlane:
        """A plane of the worker `incarnation`, whose pool lies in `memory` if others shall map it."""
        match name:
            case "shared_memory":
                return SharedMemoryPlane(pool, memory)
            case "nccl":
                real = partial(nccl_library.open_device, pool, HOST)
                return NcclPlane(pool, incarnation, self.secret, SocketDevice if pool.device.type == "cpu" else real)
            case "nixl":
                return NixlPlane(pool, incarnation, HOST)
            case "grpc":
                return GrpcPlane(pool, self.secret)
            case _:
                return InProcessPlane(pool, self.exchange, incarnation)
