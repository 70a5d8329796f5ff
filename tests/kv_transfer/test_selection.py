"""The choice of a plane: the first that both have and that connects."""

from __future__ import annotations

import logging

import pytest
import torch

from cluster.errors import PlaneUnavailable
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.kv_transfer.selection import PlaneContext, connect, publish, select_planes
from cluster.types import KVPeer
from tests.kv_transfer.owner import SECRET, SMALL

PEER = PeerDescription("127.0.0.1:1", "incarnation", SMALL, "checkpoint", "domain", {"first": b"1", "second": b"2"})


class ScriptedPlane(DataPlane):
    """Fails with `error` or answers."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name = name  # type: ignore[misc]  # each instance has its own
        self.error = error
        self.num_connects = 0

    async def publish(self) -> bytes:
        if self.error is not None:
            raise self.error
        return self.name.encode()

    async def connect(self, peer: PeerDescription) -> Connection:
        self.num_connects += 1
        if self.error is not None:
            raise self.error
        return None  # type: ignore[return-value]  # handed through

    async def close(self) -> None: ...


async def test_first_common_plane(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    planes = [
        ScriptedPlane("absent"),
        ScriptedPlane("first", PlaneUnavailable("other host")),
        ScriptedPlane("second"),
        ScriptedPlane("third"),
    ]
    choice, _ = await connect(planes, PEER)
    assert choice == KVPeer("incarnation", "second", "not absent: the peer does not have it; not first: other host")
    assert [plane.num_connects for plane in planes] == [0, 1, 1, 0]
    (line,) = caplog.messages
    assert line == "KV of incarnation comes by second (not absent: the peer does not have it; not first: other host)"


async def test_the_first_plane_needs_no_other_reason() -> None:
    choice, _ = await connect([ScriptedPlane("first"), ScriptedPlane("second")], PEER)
    assert choice == KVPeer("incarnation", "first", "first of the config")


async def test_no_common_plane() -> None:
    with pytest.raises(PlaneUnavailable, match=r"not first: why; not other: the peer does not have it"):
        await connect([ScriptedPlane("first", PlaneUnavailable("why")), ScriptedPlane("other")], PEER)


async def test_other_errors_are_not_a_reason_to_fall_back() -> None:
    with pytest.raises(MemoryError):
        await connect([ScriptedPlane("first", MemoryError()), ScriptedPlane("second")], PEER)


async def test_publish_skips_what_cannot() -> None:
    assert await publish([ScriptedPlane("first", PlaneUnavailable("why")), ScriptedPlane("second")]) == {"second": b"second"}
    with pytest.raises(PlaneUnavailable, match="first: why"):
        await publish([ScriptedPlane("first", PlaneUnavailable("why"))])
    with pytest.raises(PlaneUnavailable):
        await publish([])


async def test_planes_of_the_config() -> None:
    memory = PoolMemory()
    pool = memory.allocate(4 * SMALL.block_bytes).view(4, SMALL.block_bytes)
    planes = select_planes(["grpc", "shared_memory"], PlaneContext(pool, "incarnation", "127.0.0.1", SECRET, memory))
    assert [plane.name for plane in planes] == ["grpc", "shared_memory"]
    assert list(await publish(planes)) == ["grpc", "shared_memory"]
    for plane in planes:
        await plane.close()


async def test_block_too_large_for_a_message() -> None:
    pool = torch.empty(1, 33 * 2**20, dtype=torch.uint8)
    with pytest.raises(PlaneUnavailable, match="does not fit in a message"):
        await publish(select_planes(["grpc"], PlaneContext(pool, "incarnation", "127.0.0.1", SECRET)))
