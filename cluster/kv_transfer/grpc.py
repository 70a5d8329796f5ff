"""The plane that works anywhere: the owner sends the blocks in the stream of `KV.Fetch`. Two-sided: the owner checks the ticket again
for each chunk, so what it sends was valid when it was sent. HTTP/2's flow control keeps the owner a few chunks ahead of the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import torch
from grpc import aio

from cluster import rpc, wire
from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription
from cluster.kv_transfer.chunks import MAX_BLOCK_BYTES, ChunkWriter
from cluster.kv_transfer.control import transfer_errors
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs

_STALL_S: Final = 10.0  # a peer that sends nothing for so long is gone

_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: renewals and commits do not queue behind blocks
    # What HTTP/2 may send ahead and in one piece. Its defaults are for small messages: half as fast here.
    ("grpc.http2.lookahead_bytes", 8 * 2**20),
    ("grpc.http2.max_frame_size", 4 * 2**20),
    ("grpc.http2.bdp_probe", 0),
)


class GrpcPlane(DataPlane):
    """`pool` is uint8 `[num_blocks, block_bytes]`. What is published is served by `KVService.Fetch`."""

    name = "grpc"

    def __init__(self, pool: torch.Tensor, secret: str) -> None:
        self._block_bytes: int = pool.shape[1]
        self._secret = secret

    async def publish(self) -> bytes:
        if self._block_bytes > MAX_BLOCK_BYTES:
            raise PlaneUnavailable(f"a block of {self._block_bytes} bytes does not fit in a message")
        return b""

    async def connect(self, peer: PeerDescription) -> Connection:
        return _Stream(peer, self._secret)

    async def close(self) -> None:
        """Nothing is held."""


class _Stream(Connection):
    """A channel to one peer."""

    def __init__(self, peer: PeerDescription, secret: str) -> None:
        self._header = pb.Header(incarnation=peer.incarnation)
        self._metadata = rpc.secret_metadata(secret)
        self._channel = rpc.channel(peer.endpoint, *_OPTIONS)
        self._stub = stubs.KVStub(self._channel)
        self._block_bytes = peer.layout.block_bytes
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        assert len(indexes) == len(block_ids) and destination.shape[1] == self._block_bytes
        if self._closed:
            raise TransferError("the connection to the peer is closed")
        if not indexes:
            return
        request = pb.FetchRequest(header=self._header, ticket=wire.encode(ticket), indexes=indexes)
        call = self._stub.Fetch(request, metadata=self._metadata)
        try:
            with transfer_errors():
                await _receive(call, ChunkWriter(destination, block_ids))
        except TimeoutError as error:
            raise TransferError(f"the peer sent nothing for {_STALL_S:g} s") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._channel.close(None)


async def _receive(call: aio.UnaryStreamCall[pb.FetchRequest, pb.FetchChunk], writer: ChunkWriter) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_STALL_S) as limit:
        async for chunk in call:
            writer.write(chunk.index, chunk.data)
            limit.reschedule(loop.time() + _STALL_S)
    writer.finish()
