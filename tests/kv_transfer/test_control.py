"""KV control against a service that misbehaves. What it does when all is well is in `tests/contract`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch
from grpc.aio import AioRpcError

from cluster import rpc, wire
from cluster.errors import (
    BatonError,
    ClientGone,
    DeadlineExceeded,
    InternalError,
    NoCapacity,
    TicketMismatch,
    TicketStale,
    TransferError,
    Unauthorized,
    WrongIncarnation,
)
from cluster.kv_transfer.base import PeerDescription, Progress
from cluster.kv_transfer.control import PROTOCOL_VERSION, KVControlClient, transfer_error
from cluster.kv_transfer.grpc import GrpcPlane
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs
from tests.kv_transfer.owner import SECRET, SMALL, Owner


class Service(stubs.KVServicer):
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.description = pb.DescribeReply(protocol_version=PROTOCOL_VERSION, incarnation="this life", layout=wire.encode(SMALL))
        self.chunks: list[pb.FetchChunk] = []
        self.progress: list[pb.Progress] = []
        self.stalls = False
        self.releases: list[Callable[[], Awaitable[pb.ReleaseReply]]] = []
        self.calls: list[Any] = []

    async def Describe(self, request: Any, context: Any) -> pb.DescribeReply:  # noqa: N802
        return self.description

    async def Follow(self, request: Any, context: Any) -> AsyncIterator[pb.Progress]:  # noqa: N802
        for progress in self.progress:
            yield progress
        if self.stalls:
            await asyncio.Event().wait()

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[pb.FetchChunk]:  # noqa: N802
        for chunk in self.chunks:
            yield chunk
        if self.stalls:
            await asyncio.Event().wait()

    def Nccl(self, requests: Any, context: Any) -> AsyncIterator[pb.NcclReply]:  # noqa: N802
        raise NotImplementedError

    async def Renew(self, request: Any, context: Any) -> pb.RenewReply:  # noqa: N802
        raise NotImplementedError

    async def Release(self, request: Any, context: Any) -> pb.ReleaseReply:  # noqa: N802
        self.calls.append(request)
        return await self.releases.pop(0)()


class Remote:
    """The service on a port, and a client of it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.server = rpc.server(SECRET)
        stubs.add_KVServicer_to_server(service, self.server)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.client = KVControlClient(self.endpoint, "this life", SECRET)

    async def fetch(self, num_blocks: int) -> torch.Tensor:
        pool = torch.zeros(8, SMALL.block_bytes, dtype=torch.uint8)
        connection = await GrpcPlane(pool, SECRET).connect(PeerDescription(self.endpoint, "this life", SMALL, "", "", {"grpc": b""}))
        try:
            await connection.read(ticket(), range(num_blocks), pool, range(num_blocks))
        finally:
            await connection.close()
        return pool


def ticket() -> Any:
    owner = Owner("grpc", num_blocks=8)
    owner.memory.close()
    return owner.lease(range(8))


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    remote = Remote(Service())
    await remote.server.start()
    yield remote
    await remote.client.close()
    await remote.server.stop(None)


async def test_other_protocol_version(remote: Remote) -> None:
    remote.service.description.protocol_version = PROTOCOL_VERSION + 1
    with pytest.raises(TransferError) as caught:
        await remote.client.describe()
    assert caught.value.param == "protocol_version"


async def test_service_refuses_another_version() -> None:
    owner = Owner("grpc", num_blocks=8)
    await owner.start()
    channel = rpc.channel(owner.endpoint)
    for version in (0, PROTOCOL_VERSION + 1):
        with pytest.raises(AioRpcError) as caught:
            await stubs.KVStub(channel).Describe(pb.DescribeRequest(protocol_version=version), metadata=rpc.secret_metadata(SECRET))
        error = rpc.error_of(caught.value)
        assert type(error) is TransferError
        assert error.param == "protocol_version"
    await channel.close(None)
    await owner.close()


async def test_service_refuses_headers_and_tickets_by_name() -> None:
    owner = Owner("grpc", num_blocks=8)
    await owner.start()
    channel = rpc.channel(owner.endpoint)
    stub = stubs.KVStub(channel)
    metadata = rpc.secret_metadata(SECRET)
    name = pb.TicketName(request_id="r", attempt=0, nonce=bytes(16))
    header = pb.Header(incarnation=owner.incarnation)
    for call in (
        stub.Renew(pb.RenewRequest(ticket=name), metadata=metadata),
        stub.Release(pb.ReleaseRequest(ticket=name, header=pb.Header(incarnation="x")), metadata=metadata),
        stub.Fetch(pb.FetchRequest(), metadata=metadata).read(),
    ):
        with pytest.raises(AioRpcError) as caught:
            await call
        assert isinstance(rpc.error_of(caught.value), WrongIncarnation)
    for data in (b"", b"\xc1", wire.encode(SMALL)):
        with pytest.raises(AioRpcError) as caught:
            await stub.Fetch(pb.FetchRequest(header=header, ticket=data), metadata=metadata).read()
        error = rpc.error_of(caught.value)
        assert isinstance(error, TicketMismatch)
        assert error.param == "ticket"
    await channel.close(None)
    await owner.close()


async def test_layout_that_is_none(remote: Remote) -> None:
    remote.service.description.layout = b"\xc1"
    with pytest.raises(TransferError) as caught:
        await remote.client.describe()
    assert caught.value.param == "layout"


async def test_lost_answer_of_the_commit_is_asked_for_again(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kv_transfer.control._TIMEOUT_S", 0.1)

    async def never() -> pb.ReleaseReply:
        await asyncio.Event().wait()
        raise AssertionError

    async def valid() -> pb.ReleaseReply:
        return pb.ReleaseReply(state=pb.LEASE_STATE_VALID)

    remote.service.releases = [never, valid]
    assert await remote.client.release(ticket(), "reader")
    assert [call.taker for call in remote.service.calls] == ["reader", "reader"]
    remote.service.releases = [never, never]
    with pytest.raises(TransferError):
        await remote.client.release(ticket(), "reader")


async def test_unspecified_state_is_not_valid(remote: Remote) -> None:
    async def unspecified() -> pb.ReleaseReply:
        return pb.ReleaseReply()

    remote.service.releases = [unspecified]
    assert not await remote.client.release(ticket(), "reader")


async def test_client_closed_during_a_call(remote: Remote) -> None:
    started = asyncio.Event()

    async def never() -> pb.ReleaseReply:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    remote.service.releases = [never, never]
    releasing = asyncio.create_task(remote.client.release(ticket(), "reader"))
    await started.wait()
    await remote.client.close()
    with pytest.raises(TransferError):
        await releasing


def chunk(index: int, num_blocks: int) -> pb.FetchChunk:
    return pb.FetchChunk(index=index, data=b"\1" * (num_blocks * SMALL.block_bytes))


@pytest.mark.parametrize("chunks", [[], [chunk(0, 2)], [chunk(0, 2), chunk(0, 2)], [chunk(0, 4), chunk(4, 1)], [chunk(1, 3)]])
async def test_wrong_chunks(remote: Remote, chunks: list[pb.FetchChunk]) -> None:
    remote.service.chunks = chunks
    with pytest.raises(TransferError):
        await remote.fetch(4)


async def test_chunks_of_any_size(remote: Remote) -> None:
    remote.service.chunks = [chunk(0, 1), chunk(1, 3)]
    pool = await remote.fetch(4)
    assert bool((pool[:4] == 1).all())
    assert not pool[4:].any()


async def test_stalled_peer(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kv_transfer.grpc._STALL_S", 0.1)
    remote.service.chunks = [chunk(0, 1)]
    remote.service.stalls = True
    with pytest.raises(TransferError, match="sent nothing"):
        await remote.fetch(4)


@pytest.mark.parametrize("error", [NoCapacity("x"), DeadlineExceeded("x"), ClientGone("x")])
def test_lost_connections_are_transfer_errors(error: BatonError) -> None:
    assert type(transfer_error(error)) is TransferError


@pytest.mark.parametrize("error", [TicketStale("x"), WrongIncarnation("x"), Unauthorized("x"), InternalError("x")])
def test_the_peers_own_words_stay(error: BatonError) -> None:
    assert transfer_error(error) is error


async def test_follows_to_the_complete_ticket(remote: Remote) -> None:
    complete = ticket()
    remote.service.progress = [pb.Progress(num_ready_tokens=8), pb.Progress(num_ready_tokens=64, ticket=wire.encode(complete))]
    found = [progress async for progress in remote.client.follow(complete)]
    assert found == [Progress(8), Progress(64, complete)]


async def test_what_is_followed_must_end_with_a_ticket(remote: Remote) -> None:
    remote.service.progress = [pb.Progress(num_ready_tokens=8, ticket=b"no ticket")]
    with pytest.raises(TicketMismatch):
        async for _ in remote.client.follow(ticket()):
            pass


async def test_closing_ends_what_is_followed_and_the_watch(remote: Remote) -> None:
    remote.service.progress, remote.service.stalls = [pb.Progress(num_ready_tokens=8)], True
    following = remote.client.follow(ticket())
    assert (await anext(following)).num_ready_tokens == 8
    watch = asyncio.create_task(remote.client.wait_lost())
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0.01)
    await remote.client.close()
    async with asyncio.timeout(5):
        await watch
        with pytest.raises(TransferError):
            await waiting
