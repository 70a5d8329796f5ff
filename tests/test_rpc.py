"""Errors and the secret across a real gRPC connection."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from cluster import errors, rpc
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs

SECRET = "the secret"
HEADER = pb.Header(incarnation="x")


class Service(stubs.KVServicer):
    """Raises what it is told to, and counts its calls."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.num_calls = 0
        self.num_chunks_before = 0
        self.hanging = asyncio.Event()
        self.ended = asyncio.Event()  # of a call that hung

    async def Describe(self, request: Any, context: aio.ServicerContext[Any, Any]) -> pb.DescribeReply:  # noqa: N802
        self.num_calls += 1
        if self.hangs:
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        async with rpc.answering(context):
            if self.error is not None:
                raise self.error
        return pb.DescribeReply(incarnation="x")

    def Follow(self, request: Any, context: aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Fetch(self, request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.FetchChunk]:  # noqa: N802
        self.num_calls += 1
        async with rpc.answering(context):
            for index in range(self.num_chunks_before):
                yield pb.FetchChunk(index=index)
            if self.error is not None:
                raise self.error

    def Nccl(self, requests: Any, context: Any) -> AsyncIterator[pb.NcclReply]:  # noqa: N802
        raise NotImplementedError

    async def Renew(self, request: Any, context: Any) -> pb.RenewReply:  # noqa: N802
        raise NotImplementedError

    async def Release(self, request: Any, context: Any) -> pb.ReleaseReply:  # noqa: N802
        raise NotImplementedError


class Remote:
    """The service on a port and a stub for it."""

    def __init__(self, secret: str = SECRET) -> None:
        self.service = Service()
        self.server = rpc.server(secret)
        stubs.add_KVServicer_to_server(self.service, self.server)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = rpc.channel(self.endpoint)
        self.stub = stubs.KVStub(self.channel)

    async def __aenter__(self) -> Remote:
        await self.server.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.channel.close(None)
        await self.server.stop(None)

    async def unary(self, metadata: Any = rpc.secret_metadata(SECRET), timeout_s: float | None = 5.0) -> errors.BatonError | None:  # noqa: B008
        try:
            await self.stub.Describe(pb.DescribeRequest(), metadata=metadata, timeout=timeout_s)
        except aio.AioRpcError as error:
            return rpc.error_of(error)
        return None

    async def stream(self, metadata: Any = rpc.secret_metadata(SECRET)) -> tuple[int, errors.BatonError | None]:  # noqa: B008
        num_chunks = 0
        try:
            async for _ in self.stub.Fetch(pb.FetchRequest(), metadata=metadata, timeout=5.0):
                num_chunks += 1
        except aio.AioRpcError as error:
            return num_chunks, rpc.error_of(error)
        return num_chunks, None


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    async with Remote() as remote:
        yield remote


def all_classes(root: type[errors.BatonError] = errors.BatonError) -> list[type[errors.BatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in all_classes(child))]


LEAVES = [cls for cls in all_classes() if not cls.__subclasses__()]


def assert_same(got: errors.BatonError | None, sent: errors.BatonError) -> None:
    assert got is not None
    assert type(got) is type(sent)
    assert (got.message, got.param, got.retry_after_s) == (sent.message, sent.param, sent.retry_after_s)


@pytest.mark.parametrize("cls", LEAVES)
async def test_every_class_survives(remote: Remote, cls: type[errors.BatonError]) -> None:
    remote.service.error = cls("what went wrong", param="some.field", retry_after_s=1.25)
    assert_same(await remote.unary(), remote.service.error)
    remote.service.num_chunks_before = 3
    num_chunks, error = await remote.stream()
    assert num_chunks == 3
    assert_same(error, remote.service.error)


@pytest.mark.parametrize(
    "error",
    [
        errors.Overloaded("full"),
        errors.Overloaded("full", retry_after_s=0.0),
        errors.Overloaded("full", retry_after_s=1 / 3),
        errors.InvalidRequest("bad", param=""),
        errors.InvalidRequest("schlecht: größe ≤ 0 \n 'x' %41", param="größe[„a“]\n%41"),
        errors.InvalidRequest(""),
        errors.InvalidRequest("≤" * 500, param="≤" * 100),
    ],
)
async def test_message_param_and_retry_survive(remote: Remote, error: errors.BatonError) -> None:
    remote.service.error = error
    got = await remote.unary()
    assert got is not None
    assert (type(got), got.param, got.retry_after_s) == (type(error), error.param, error.retry_after_s)
    assert got.message == (error.message or "INVALID_ARGUMENT")


async def test_endless_message_is_cut(remote: Remote) -> None:
    remote.service.error = errors.InvalidRequest("≤" * 100_000, param="≤" * 500)
    got = await remote.unary()
    assert type(got) is errors.InvalidRequest
    assert got.message == "≤" * 499 + "…"
    assert got.param == "≤" * 199 + "…"


async def test_bug_is_an_internal_error(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    remote.service.error = ValueError("a bug")
    assert isinstance(await remote.unary(), errors.InternalError)


WRONG = [
    None,
    (),
    rpc.secret_metadata(""),
    rpc.secret_metadata("wrong"),
    rpc.secret_metadata(SECRET + "x"),
    rpc.secret_metadata(SECRET[:-1]),
    ((rpc.SECRET_KEY + "-bin", SECRET.encode()),),
    (("x-other", SECRET),),
]


@pytest.mark.parametrize("metadata", WRONG)
async def test_without_the_secret_no_handler_runs(remote: Remote, metadata: Any) -> None:
    assert isinstance(await remote.unary(metadata), errors.Unauthorized)
    num_chunks, error = await remote.stream(metadata)
    assert num_chunks == 0
    assert isinstance(error, errors.Unauthorized)
    assert remote.service.num_calls == 0
    assert await remote.unary() is None
    assert await remote.stream() == (0, None)
    assert remote.service.num_calls == 2


@pytest.mark.parametrize("secret", ["пароль ключ", "clé secrète", "  spaces  ", "line\nbreak", "🔑"])
async def test_secret_of_any_text(secret: str) -> None:
    async with Remote(secret) as remote:
        assert await remote.unary(rpc.secret_metadata(secret)) is None
        assert isinstance(await remote.unary(rpc.secret_metadata(secret[:-1])), errors.Unauthorized)
        assert isinstance(await remote.unary(), errors.Unauthorized)


async def test_unknown_method(remote: Remote) -> None:
    call = remote.channel.unary_unary("/baton.worker.v1.KV/Nothing", None, None)
    with pytest.raises(aio.AioRpcError) as caught:
        await call(b"", metadata=rpc.secret_metadata(SECRET))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(rpc.error_of(caught.value), errors.InternalError)


async def test_unreachable_worker(remote: Remote) -> None:
    await remote.server.stop(None)
    assert type(await remote.unary()) is errors.NoCapacity


async def test_deadline(remote: Remote) -> None:
    remote.service.hangs = True
    assert isinstance(await remote.unary(timeout_s=0.05), errors.DeadlineExceeded)


async def test_two_servers_never_share_a_port(remote: Remote) -> None:
    other = rpc.server(SECRET)
    with pytest.raises(RuntimeError):
        other.add_insecure_port(remote.endpoint)
    await other.stop(None)


def failure(code: grpc.StatusCode, details: str = "details", **trailing: str) -> aio.AioRpcError:
    metadata = aio.Metadata(*((key.replace("_", "-"), value) for key, value in trailing.items()))
    return aio.AioRpcError(code, aio.Metadata(), metadata, details, None)


def test_a_call_that_broke_within_grpc_reached_nobody() -> None:
    """Seen when a connection closes in the instant in which a message is written."""
    assert type(rpc.error_of(failure(grpc.StatusCode.INTERNAL, "Internal error from Core"))) is errors.NoCapacity
    assert type(rpc.error_of(failure(grpc.StatusCode.INTERNAL, "anything else"))) is errors.InternalError


def test_code_of_no_row_is_an_internal_error() -> None:
    error = rpc.error_of(failure(grpc.StatusCode.INTERNAL, baton_error_code="from_the_future"))
    assert type(error) is errors.InternalError
    assert error.message == "details"


def test_nonsense_in_the_trailer_is_no_new_failure() -> None:
    error = rpc.error_of(failure(grpc.StatusCode.INTERNAL, baton_error_code="overloaded", baton_error_retry_after_s="soon"))
    assert type(error) is errors.Overloaded
    assert error.retry_after_s is None


CALLER = """
import asyncio, sys
from cluster import rpc
from cluster.pb import worker_pb2 as pb, worker_pb2_grpc as stubs

async def main():
    channel = rpc.channel(sys.argv[1])
    print("calling", flush=True)
    await stubs.KVStub(channel).Describe(pb.DescribeRequest(), metadata=rpc.secret_metadata(sys.argv[2]))

asyncio.run(main())
"""


@pytest.mark.slow
async def test_the_call_of_a_process_that_is_stopped_ends(remote: Remote) -> None:
    """Nothing closes its connection: what it holds must be freed all the same (promise P6)."""
    remote.service.hangs = True
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, remote.endpoint, SECRET)
    try:
        async with asyncio.timeout(30):
            await remote.service.hanging.wait()
            caller.send_signal(signal.SIGSTOP)
            await remote.service.ended.wait()
    finally:
        caller.kill()
        await caller.wait()
