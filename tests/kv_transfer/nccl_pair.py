"""An owner and a reader over NCCL's stand-in."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from cluster import wire
from cluster.kv_transfer.base import PeerDescription
from cluster.kv_transfer.nccl import NcclPlane
from cluster.kv_transfer.nccl_link import NcclLink
from tests.kv_transfer.owner import CHECKPOINT, SECRET, Owner
from tests.kv_transfer.socket_device import SocketDevice


def description(owner: Owner, **changes: Any) -> PeerDescription:
    """Of an owner that has started, with another pool or life than its own if `changes` say so."""
    assert isinstance(owner.plane, NcclPlane) and owner.plane._owner is not None
    incarnation = changes.pop("incarnation", owner.incarnation)
    planes = {"nccl": wire.encode(dataclasses.replace(owner.plane._owner.description, **changes))}
    return PeerDescription(owner.endpoint, incarnation, owner.layout, CHECKPOINT, "domain", planes)


@asynccontextmanager
async def started(**arguments: object) -> AsyncIterator[Owner]:
    owner = Owner("nccl", **arguments)  # type: ignore[arg-type]
    await owner.start()
    yield owner
    await owner.close()


@asynccontextmanager
async def connected(owner: Owner, pool: torch.Tensor, device: SocketDevice | None = None) -> AsyncIterator[NcclLink]:
    plane = NcclPlane(pool, "the reader", SECRET, lambda: device or SocketDevice())
    link = await plane.connect(description(owner))
    assert isinstance(link, NcclLink)
    yield link
    await link.close()
    await plane.close()


def empty(num_blocks: int, owner: Owner) -> torch.Tensor:
    return torch.zeros(num_blocks, owner.layout.block_bytes, dtype=torch.uint8)


def names_of_threads() -> list[str]:
    """Of ranks and communicators in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("kv-nccl", "socket-stream"))]
