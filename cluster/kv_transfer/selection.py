"""Which planes a worker has, and which one a pair of workers uses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from cluster.config import PlaneName
from cluster.errors import PlaneUnavailable
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription
from cluster.kv_transfer.nccl import NcclPlane
from cluster.types import KVPeer

if TYPE_CHECKING:
    from cluster.kv_transfer.pool_memory import PoolMemory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlaneContext:
    """What planes are made of. `memory` is where `pool` was allocated, on a worker whose pool others shall read."""

    pool: torch.Tensor  # the own pool, uint8 `[num_blocks, block_bytes]`
    incarnation: str  # of this worker
    host: str  # that it binds to
    secret: str  # of the cluster
    memory: PoolMemory | None = None


def select_planes(names: Sequence[PlaneName], context: PlaneContext) -> list[DataPlane]:
    """The planes of the config (`kv_transfer.planes`) that this machine has, in the config's order."""
    found = [_build(name, context) for name in names]
    return [plane for plane in found if plane is not None]


def _build(name: PlaneName, context: PlaneContext) -> DataPlane | None:
    # A plane's module is imported where it is used: other planes need libraries that not every machine has.
    match name:
        case "shared_memory":
            if sys.platform != "linux":
                _log.info("no shared_memory plane: %s has no memfd", sys.platform)
                return None
            from cluster.kv_transfer.shared_memory import SharedMemoryPlane

            return SharedMemoryPlane(context.pool, context.memory)
        case "nixl":
            from cluster.kv_transfer import nixl_library

            if not nixl_library.is_installed():
                _log.warning("no nixl plane: the package is not installed")
                return None
            from cluster.kv_transfer.nixl import NixlPlane

            return NixlPlane(context.pool, context.incarnation, context.host)
        case "nccl":
            from cluster.kv_transfer import nccl_library

            if not nccl_library.is_installed():
                _log.warning("no nccl plane: the package cupy is not installed")
                return None
            return NcclPlane(context.pool, context.incarnation, context.secret, partial(nccl_library.open_device, context.pool, context.host))
        case "grpc":
            from cluster.kv_transfer.grpc import GrpcPlane

            return GrpcPlane(context.pool, context.secret)


def find_nccl(planes: Sequence[DataPlane]) -> NcclPlane | None:
    """The plane whose owner has calls of its own to answer: `KVService` passes them on."""
    return next((plane for plane in planes if isinstance(plane, NcclPlane)), None)


async def publish(planes: Sequence[DataPlane]) -> dict[str, bytes]:
    """Publishes the pool on all planes that can: what `KVService` describes.

    Raises:
        PlaneUnavailable: on none.
    """
    published: dict[str, bytes] = {}
    reasons = []
    for plane in planes:
        try:
            published[plane.name] = await plane.publish()
        except PlaneUnavailable as error:
            _log.warning("the KV pool is not readable by %s: %s", plane.name, error)
            reasons.append(f"{plane.name}: {error}")
    if not published:
        raise PlaneUnavailable("; ".join(reasons) or "no data plane is configured")
    return published


async def connect(planes: Sequence[DataPlane], peer: PeerDescription) -> tuple[KVPeer, Connection]:
    """The first of our planes that the peer has too and that reaches it, and the connection.

    Raises:
        PlaneUnavailable: there is none; says why for each.
    """
    reasons: list[str] = []
    for plane in planes:
        if plane.name not in peer.planes:
            reasons.append(f"not {plane.name}: the peer does not have it")
            continue
        try:
            connection = await plane.connect(peer)
        except PlaneUnavailable as error:
            reasons.append(f"not {plane.name}: {error}")
            continue
        choice = KVPeer(peer.incarnation, plane.name, "; ".join(reasons) or "first of the config")
        _log.info("KV of %s comes by %s (%s)", choice.incarnation, choice.plane, choice.reason)
        return choice, connection
    raise PlaneUnavailable(f"no data plane reaches {peer.endpoint} ({'; '.join(reasons) or 'none is configured'})")
