"""Owners that NCCL cannot reach, or no longer: ranks that do not come, stop, or are somebody else's."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from grpc import aio

from cluster import rpc
from cluster.errors import PlaneUnavailable, Unauthorized, WrongIncarnation
from cluster.kv_transfer import nccl_link, nccl_rank
from cluster.kv_transfer.nccl import NcclPlane
from cluster.kv_transfer.nccl_device import OWNER_RANK, READER_RANK
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import KVStub
from tests.eventually import eventually
from tests.kv_transfer.nccl_pair import description, empty, names_of_threads, started
from tests.kv_transfer.owner import SECRET, Owner
from tests.kv_transfer.process_state import Held, nothing_beyond
from tests.kv_transfer.remote_owner import RemoteOwner
from tests.kv_transfer.socket_device import SocketCommunicator, SocketDevice


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    async with started() as owner:
        yield owner


@pytest.fixture
async def remote_owner() -> AsyncIterator[RemoteOwner]:
    owner = await RemoteOwner.start("nccl")
    yield owner
    owner.process.signal(signal.SIGCONT)
    await owner.close()


class TestRemotePeer:
    async def test_that_stops_during_a_read(self, remote_owner: RemoteOwner, monkeypatch: pytest.MonkeyPatch) -> None:
        await remote_owner.check_stop_ends_a_read(monkeypatch, "cluster.kv_transfer.nccl_link._STALL_S")

    async def test_that_stops_does_not_hold_a_cancelled_read(self, remote_owner: RemoteOwner) -> None:
        await remote_owner.check_stop_holds_no_cancelled_read(nccl_link._STALL_S / 2)  # it need not wait for that


class TestPeer:
    async def test_with_another_nccl(self, owner: Owner) -> None:
        with pytest.raises(PlaneUnavailable, match="the peer has NCCL 21801, this worker 23203"):
            await NcclPlane(empty(1, owner), "the reader", SECRET, SocketDevice).connect(description(owner, version=21801))

    async def test_whose_description_is_no_good(self, owner: Owner) -> None:
        peer = dataclasses.replace(description(owner), planes={"nccl": b"?"})
        with pytest.raises(PlaneUnavailable, match="is no good"):
            await NcclPlane(empty(1, owner), "the reader", SECRET, SocketDevice).connect(peer)

    async def test_that_is_another_pool(self, owner: Owner) -> None:
        before = Held.now()
        with pytest.raises(PlaneUnavailable, match="another pool than the peer's"):
            await NcclPlane(empty(1, owner), "the reader", SECRET, SocketDevice).connect(description(owner, token=bytes(16)))
        await nothing_beyond(before)

    async def test_of_another_life(self, owner: Owner) -> None:
        with pytest.raises(WrongIncarnation):
            await NcclPlane(empty(1, owner), "the reader", SECRET, SocketDevice).connect(description(owner, incarnation="another"))

    async def test_that_asks_for_the_secret(self, owner: Owner) -> None:
        plane = NcclPlane(empty(1, owner), "the reader", "wrong", SocketDevice)
        with pytest.raises(Unauthorized):
            await plane.connect(description(owner))

    async def test_whose_pool_is_not_published(self) -> None:
        owner = Owner("grpc")
        await owner.start()
        async with rpc.channel(owner.endpoint) as channel:
            call: Any = KVStub(channel).Nccl(metadata=rpc.secret_metadata(SECRET))  # type: ignore[call-arg]  # the stubs know iterators only
            await call.write(pb.NcclRequest(join=pb.NcclJoin(header=pb.Header(incarnation=owner.incarnation))))
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
        assert isinstance(rpc.error_of(caught.value), PlaneUnavailable)
        await owner.close()

    @pytest.mark.parametrize("absent", [READER_RANK, OWNER_RANK])
    async def test_that_joins_late(self, absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other rank's join cannot be called back: it is given up, and what comes of it in the end is aborted."""
        monkeypatch.setattr(nccl_rank, "_JOIN_S", 0.3)
        devices = {rank: _LateDevice() if rank == absent else SocketDevice() for rank in (READER_RANK, OWNER_RANK)}
        owner = Owner("nccl")
        owner.plane = NcclPlane(owner.pool, owner.incarnation, SECRET, lambda: devices[OWNER_RANK])
        await owner.start()
        pool = empty(1, owner)
        reader = NcclPlane(pool, "the reader", SECRET, lambda: devices[READER_RANK])
        async with asyncio.timeout(10):
            with pytest.raises(PlaneUnavailable, match=r"joining the communicator took longer than 0\.3 s"):
                await reader.connect(description(owner))
            monkeypatch.undo()
            late = devices[absent]
            assert isinstance(late, _LateDevice)
            late.may_join.set()
            await eventually(lambda: not names_of_threads())  # of ranks and of communicators
            link = await reader.connect(description(owner))
            await link.read(owner.lease([5]), [0], pool, [0])
            await link.close()
        assert torch.equal(pool[0], owner.pool[5])
        await owner.close()


class _LateDevice(SocketDevice):
    """Does not join before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_join = threading.Event()

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> SocketCommunicator:
        self.may_join.wait()
        return super().join(unique_id, rank, num_ranks)
