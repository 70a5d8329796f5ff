"""NCCL's own ways to go wrong, beside what every plane must do: ranks that do not come, stop, disagree, or do not let go."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from grpc import aio

from cluster import rpc, wire
from cluster.errors import PlaneUnavailable, TicketMismatch, TicketStale, TransferError, Unauthorized, WrongIncarnation
from cluster.kv_transfer import nccl_link, nccl_owner, nccl_rank
from cluster.kv_transfer.base import PeerDescription
from cluster.kv_transfer.nccl import NcclPlane
from cluster.kv_transfer.nccl_device import MAX_GROUP_ROWS, OWNER_RANK, READER_RANK, NcclPool
from cluster.kv_transfer.nccl_link import NcclLink
from cluster.kv_transfer.patience import Patience
from cluster.pb import worker_pb2 as pb
from cluster.pb.worker_pb2_grpc import KVStub
from tests.kv_transfer.owner import CHECKPOINT, LARGE, SECRET, SMALL, Owner
from tests.kv_transfer.process_state import Held, eventually
from tests.kv_transfer.remote_owner import RemoteOwner
from tests.kv_transfer.socket_device import SocketCommunicator, SocketDevice


def description(owner: Owner, **changes: object) -> PeerDescription:
    """Of an owner that has started, with another pool or life than its own if `changes` say so."""
    assert isinstance(owner.plane, NcclPlane) and owner.plane._owner is not None
    pool = owner.plane._owner.description
    fields: dict[str, Any] = {name: changes.pop(name, getattr(pool, name)) for name in NcclPool.__slots__}
    incarnation = str(changes.pop("incarnation", owner.incarnation))
    assert not changes
    planes = {"nccl": wire.encode(NcclPool(**fields))}
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
        await remote_owner.read()
        peer = await remote_owner.peers.get(remote_owner.ticket)
        remote_owner.pool.zero_()
        monkeypatch.setattr(nccl_link, "_STALL_S", 1.0)
        remote_owner.process.signal(signal.SIGSTOP)
        async with asyncio.timeout(20):
            with pytest.raises(TransferError):
                await remote_owner.read()
        assert peer.connection.closed
        remote_owner.pool.fill_(7)
        remote_owner.process.signal(signal.SIGCONT)
        monkeypatch.undo()
        await remote_owner.read_into(torch.zeros_like(remote_owner.pool))  # anew; what was still on its way comes before this
        assert bool((remote_owner.pool == 7).all())

    async def test_that_stops_does_not_hold_a_cancelled_read(self, remote_owner: RemoteOwner) -> None:
        await remote_owner.read()
        remote_owner.process.signal(signal.SIGSTOP)
        reading = asyncio.create_task(remote_owner.read())
        await asyncio.sleep(0.1)
        reading.cancel()
        async with asyncio.timeout(nccl_link._STALL_S / 2):  # it need not wait for that
            with pytest.raises(asyncio.CancelledError):
                await reading
        remote_owner.pool.fill_(7)
        remote_owner.process.signal(signal.SIGCONT)
        await remote_owner.read_into(torch.zeros_like(remote_owner.pool))
        assert bool((remote_owner.pool == 7).all())


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
        await eventually(lambda: Held.now().num_threads <= before.num_threads + 1)  # that of `asyncio.to_thread`

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


def names_of_threads() -> list[str]:
    """Of ranks and communicators in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("kv-nccl", "socket-stream"))]


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
        before = Held.now().num_threads
        async with connected(owner, empty(4, owner)) as link:
            await owner.plane.close()
            await eventually(lambda: link.closed)
            with pytest.raises(PlaneUnavailable, match="the worker closes"):
                await NcclPlane(empty(1, owner), "the reader", SECRET, SocketDevice).connect(description(owner))
        await owner.close()
        await eventually(lambda: not names_of_threads())
        await eventually(lambda: Held.now().num_threads <= before + 1)

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
