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
from cluster.kv_transfer import nccl_library, nixl_library
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
    why_not = _why_not(name)
    if why_not is not None:
        _log.warning("no %s plane: %s", name, why_not)
        return None
    # Planes whose modules need libraries that not every machine has are imported where they are used; NCCL's asks for its own later.
    match name:
        case "shared_memory":
            from cluster.kv_transfer.shared_memory import SharedMemoryPlane

            return SharedMemoryPlane(context.pool, context.memory)
        case "nccl":
            open_device = partial(nccl_library.open_device, context.pool, context.host)
            return NcclPlane(context.pool, context.incarnation, context.secret, open_device)
        case "nixl":
            from cluster.kv_transfer.nixl import NixlPlane

            return NixlPlane(context.pool, context.incarnation, context.host)
        case "grpc":
            from cluster.kv_transfer.grpc import GrpcPlane

            return GrpcPlane(context.pool, context.secret)


def _why_not(name: PlaneName) -> str | None:
    """What this machine lacks for the plane."""
    if name == "shared_memory" and sys.platform != "linux":
        return f"{sys.platform} has no memfd"
    if name == "nccl" and not nccl_library.is_installed():
        return "the package cupy is not installed"
    if name == "nixl" and not nixl_library.is_installed():
        return "the package nixl is not installed"
    return None


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
