"""Reads over NCCL that go wrong, beside what every plane must do, and what is left when a pair ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grpc import aio

from cluster import rpc
from cluster.errors import PlaneUnavailable, TicketMismatch, TicketStale, TransferError, WrongIncarnation
from cluster.kv_transfer import nccl_link, nccl_owner
from cluster.kv_transfer.nccl import NcclPlane
from cluster.kv_transfer.nccl_device import MAX_GROUP_ROWS
from cluster.kv_transfer.patience import Patience
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import KVStub
from tests.eventually import eventually
from tests.kv_transfer.nccl_pair import connected, description, empty, names_of_threads, started
from tests.kv_transfer.owner import LARGE, SECRET, SMALL, Owner
from tests.kv_transfer.process_state import Held, nothing_beyond
from tests.kv_transfer.socket_device import SocketCommunicator, SocketDevice


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    async with started() as owner:
        yield owner


class TestRead:
    async def test_of_more_rows_than_a_group_may_have(self) -> None:
        num_blocks = 2 * MAX_GROUP_ROWS + 5
        async with started(num_blocks=num_blocks) as owner:
            pool = empty(num_blocks, owner)
            async with connected(owner, pool) as link:
                await link.read(owner.lease(range(num_blocks)), range(num_blocks), pool, range(num_blocks))
            assert torch.equal(pool, owner.pool)

    async def test_that_is_refused_leaves_the_connection(self, owner: Owner) -> None:
        pool = empty(4, owner)
        async with connected(owner, pool) as link:
            stale, good = owner.lease([1]), owner.lease([2])
            del owner.leases.live[stale.key]
            for _ in range(3):
                with pytest.raises(TicketStale):
                    await link.read(stale, [0], pool, [0])
            await link.read(good, [0], pool, [0])
            assert not link.closed
            assert torch.equal(pool[0], owner.pool[2])

    async def test_checks_the_ticket_for_each_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl_link, "GROUP_BYTES", LARGE.block_bytes)
        async with started(layout=LARGE, num_blocks=8) as owner:
            pool = empty(8, owner)
            async with connected(owner, pool) as link:
                await link.read(owner.lease(range(8)), range(8), pool, range(8))
            assert owner.leases.num_checks == 8

    async def test_into_other_memory_than_the_pools(self, owner: Owner) -> None:
        async with connected(owner, empty(1, owner)) as link:
            elsewhere = torch.empty(4, SMALL.block_bytes, dtype=torch.uint8, device="meta")
            with pytest.raises(TransferError, match="cannot write to meta memory, the pool is in that of cpu"):
                await link.read(owner.lease([1]), [0], elsewhere, [0])
            assert not link.closed

    async def test_of_too_many_blocks_at_once_is_refused_by_the_owner(self, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl_owner, "MAX_GROUP_ROWS", 3)
        pool = empty(4, owner)
        async with connected(owner, pool) as link:
            with pytest.raises(TicketMismatch) as caught:
                await link.read(owner.lease(range(4)), range(4), pool, range(4))
            assert caught.value.param == "indexes"

    async def test_ends_only_when_the_device_has_let_go(self, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl_link, "_STALL_S", 0.3)
        device = _HoldingDevice()
        pool = empty(4, owner)
        async with connected(owner, pool, device) as link:
            with device.holding():
                reading = asyncio.create_task(link.read(owner.lease([1]), [0], pool, [0]))
                await eventually(device.is_aborting.is_set)
                await asyncio.sleep(0.2)
                assert not reading.done(), "its rows may still be written"
            with pytest.raises(TransferError, match="took longer"):
                await reading
            assert link.closed

    async def test_of_readers_and_owners_in_a_circle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two readers at once from two owners: no device has groups of two communicators on it, and nobody waits for ever."""
        monkeypatch.setattr(nccl_link, "GROUP_BYTES", 4 * SMALL.block_bytes)
        async with started() as first, started() as second:
            devices = [_CountingDevice() for _ in range(2)]
            planes = [NcclPlane(empty(64, first), "a reader", SECRET, lambda device=device: device) for device in devices]  # type: ignore[misc]
            owners, pools = [first, second], [[empty(64, first) for _ in range(2)] for _ in range(2)]
            links = [[await plane.connect(description(owner)) for owner in owners] for plane in planes]
            reads = []
            for reader in range(2):
                for source in (reader, 1 - reader):  # in opposite orders
                    ticket, destination = owners[source].lease(range(63, -1, -1)), pools[reader][source]
                    reads.append(links[reader][source].read(ticket, range(64), destination, range(64)))
            async with asyncio.timeout(30):
                await asyncio.gather(*reads)
            for reader in range(2):
                for source in range(2):
                    assert torch.equal(pools[reader][source], owners[source].pool.flip(0))
                    await links[reader][source].close()
            assert [device.most_active for device in devices] == [1, 1]

    async def test_whose_reader_goes_away_gives_the_owners_device_back(self, owner: Owner) -> None:
        pool, other_pool = empty(4, owner), empty(4, owner)
        device = _HoldingDevice()
        async with connected(owner, pool, device) as link, connected(owner, other_pool) as other:
            with device.holding():
                reading = asyncio.create_task(link.read(owner.lease([1]), [0], pool, [0]))
                await eventually(device.is_posting.is_set)
                waiting = asyncio.create_task(other.read(owner.lease([2]), [0], other_pool, [0]))
                await asyncio.sleep(0.1)
                assert not waiting.done(), "the owner's device waits for the first reader"
                reading.cancel()
            await asyncio.wait([reading])
            await asyncio.wait_for(waiting, 5)
            assert torch.equal(other_pool[0], owner.pool[2])


class _HoldingDevice(SocketDevice):
    """While it is told to, its ranks keep what is posted and do not come back from an abort."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.is_posting = threading.Event()
        self.is_aborting = threading.Event()

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> SocketCommunicator:
        communicator = super().join(unique_id, rank, num_ranks)
        post, abort = communicator.post, communicator.abort

        def held_post(**rows: object) -> object:
            self.is_posting.set()
            self.free.wait()
            return post(**rows)  # type: ignore[arg-type]

        def held_abort() -> None:
            self.is_aborting.set()
            self.free.wait()
            abort()

        communicator.post, communicator.abort = held_post, held_abort  # type: ignore[method-assign, assignment]
        return communicator

    @contextmanager
    def holding(self) -> Iterator[None]:
        self.free.clear()
        self.is_posting.clear()
        yield
        self.free.set()


class _CountingDevice(SocketDevice):
    """Knows of how many communicators there were groups on it at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.most_active = 0
        self._active: dict[object, set[object]] = {}

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> SocketCommunicator:
        communicator = super().join(unique_id, rank, num_ranks)
        post, is_done = communicator.post, communicator.is_done
        groups = self._active.setdefault(communicator, set())

        def counted_post(**rows: object) -> object:
            group = post(**rows)  # type: ignore[arg-type]
            groups.add(id(group))
            self.most_active = max(self.most_active, sum(map(bool, self._active.values())))
            return group

        def counted_is_done(group: object) -> bool:
            if not is_done(group):
                return False
            groups.discard(id(group))
            return True

        communicator.post, communicator.is_done = counted_post, counted_is_done  # type: ignore[method-assign, assignment]
        return communicator


class TestEnd:
    async def test_of_the_owner_ends_its_calls_and_frees_all(self) -> None:
        owner = Owner("nccl")
        await owner.start()
        before = Held.now()
        async with connected(owner, empty(4, owner)) as link:
            await owner.plane.close()
            await eventually(lambda: link.closed)
            with pytest.raises(PlaneUnavailable, match="the worker closes"):
                await NcclPlane(empty(1, owner), "the reader", SECRET, SocketDevice).connect(description(owner))
        await owner.close()
        await eventually(lambda: not names_of_threads())
        await nothing_beyond(before)

    async def test_of_a_reader_that_sends_nonsense_is_its_own(self, owner: Owner) -> None:
        async with rpc.channel(owner.endpoint) as channel:
            call: Any = KVStub(channel).Nccl(metadata=rpc.secret_metadata(SECRET))  # type: ignore[call-arg]  # the stubs know iterators only
            await call.write(pb.NcclRequest(fetch=pb.FetchRequest()))  # no join
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert isinstance(rpc.error_of(caught.value), WrongIncarnation)
        pool = empty(1, owner)
        async with connected(owner, pool) as link:
            for fetch in (pb.FetchRequest(header=link._header, ticket=b"?", indexes=[0]), pb.FetchRequest(indexes=[0])):
                answer = await link._stream.ask(pb.NcclRequest(fetch=fetch), lambda _: None, Patience(5))
                assert isinstance(answer, TicketMismatch if fetch.ticket else WrongIncarnation)
            await link.read(owner.lease([1]), [0], pool, [0])
