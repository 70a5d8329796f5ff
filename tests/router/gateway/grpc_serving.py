"""The gRPC server of a fake cluster's gateway on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from router.gateway.grpc_server import GrpcServer, GrpcSettings
from tests.router.gateway.fakes import FakeCluster


@asynccontextmanager
async def grpc_target(cluster: FakeCluster) -> AsyncIterator[str]:
    """`host:port` of a started server."""
    server = GrpcServer(cluster.gateway, GrpcSettings("127.0.0.1", 0, shares_port=False, drain_s=0.0))
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.close()


@asynccontextmanager
async def grpc_stub(cluster: FakeCluster) -> AsyncIterator[Any]:
    """A client's stub; the asyncio one, whose generated type only type checkers know."""
    async with grpc_target(cluster) as target, aio.insecure_channel(target) as channel:
        yield InferenceStub(channel)


def request(**fields: Any) -> pb.GenerateRequest:
    """As `serving.COMPLETION`, with changes."""
    prompt = {} if {"text", "token_ids"} & fields.keys() else {"text": "The capital"}
    return pb.GenerateRequest(**{"model": "tiny", "max_tokens": 8, **prompt, **fields})


async def generate(stub: Any, **fields: Any) -> list[pb.GenerateResponse]:
    """All messages of one call."""
    return [message async for message in stub.Generate(request(**fields), timeout=20)]


def text_in(messages: Sequence[pb.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


def tokens_in(messages: Sequence[pb.GenerateResponse]) -> list[pb.Token]:
    return [token for message in messages for token in message.tokens]


async def read_to_end(call: Any, into: list[Any]) -> None:
    """Adds the messages that are still to come, also where some were read before. Raises what the call fails with."""
    while (message := await call.read()) is not aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
        into.append(message)


async def failure(call: Any) -> aio.AioRpcError:
    """How a call failed."""
    with pytest.raises(aio.AioRpcError) as raised:
        await read_to_end(call, [])
    return raised.value


def trailing(error: aio.AioRpcError) -> dict[str, str]:
    """Its trailing metadata."""
    return {str(key): str(value) for key, value in error.trailing_metadata() or ()}  # type: ignore[misc, has-type]
