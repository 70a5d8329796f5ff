"""The gateway's side of the workers' gRPC: one channel for each endpoint, and streams whose failures are `cluster.errors`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from grpc import aio

from cluster import rpc
from cluster.convert import request_to_pb
from cluster.errors import BatonError, ClientGone, NoCapacity, Unauthorized, WorkerRefusal
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc
from cluster.types import Request, WorkerAddress

E = TypeVar("E")

_MAX_IDLE_CHANNELS: Final = 64  # workers that are gone never come back under their old address


class WorkerStream(Generic[E]):
    """One server-streaming call, read one event at a time."""

    def __init__(self, call: aio.UnaryStreamCall[Any, E]) -> None:
        self._call = call

    async def read(self) -> E | None:
        """The next event; None when the worker ended the stream well. Cancelling it ends the call.

        Raises:
            BatonError: the call failed; the worker's own error where it sent one.
        """
        try:
            return await rpc.read(self._call)
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        except aio.AioRpcError as failure:
            raise _error_of(failure) from failure

    def cancel(self) -> None:
        """Ends the call; the worker frees what it held for it. Idempotent."""
        self._call.cancel()


def _error_of(failure: aio.AioRpcError) -> BatonError:
    error = rpc.error_of(failure)
    if isinstance(error, ClientGone):  # nobody reads a call that the gateway itself cancelled: the worker ended this one
        return NoCapacity(f"the worker ended the call: {error.message}")
    if isinstance(error, Unauthorized):  # not the client's fault: the worker is of another start, with another secret
        return WorkerRefusal(f"the worker refused this gateway: {error.message}")
    return error


@dataclass(slots=True)
class _Peer:
    channel: aio.Channel
    live: set[object] = field(default_factory=set)  # one token for each call that has not ended


class WorkerClients:
    """Opens calls to workers. Channels are kept, so a call to a known worker costs no connect."""

    def __init__(self, secret: str) -> None:
        self._metadata = rpc.secret_metadata(secret)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # the least recently used first
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return sum(len(peer.live) for peer in self._peers.values())

    def prefill(self, worker: WorkerAddress, router_epoch: int, request: Request, timeout_s: float) -> WorkerStream[pb.PrefillEvent]:
        """Starts a prefill; `timeout_s` is what is left of the request's deadline."""
        peer = self._peer(worker.endpoint)
        message = pb.PrefillRequest(header=_header(worker, router_epoch), request=request_to_pb(request))
        stub = worker_pb2_grpc.PrefillStub(peer.channel)
        return self._stream(peer, stub.Prefill(message, timeout=timeout_s, metadata=self._metadata))

    def decode(
        self, worker: WorkerAddress, router_epoch: int, request: Request, timeout_s: float, *, ticket: bytes = b""
    ) -> WorkerStream[pb.DecodeEvent]:
        """Starts a decode of the ticket's KV, or of the whole request where the worker prefills too."""
        peer = self._peer(worker.endpoint)
        message = pb.DecodeRequest(header=_header(worker, router_epoch), request=request_to_pb(request), ticket=ticket)
        stub = worker_pb2_grpc.DecodeStub(peer.channel)
        return self._stream(peer, stub.Decode(message, timeout=timeout_s, metadata=self._metadata))

    async def close(self) -> None:
        """Closes all channels, which cancels the calls on them. Idempotent."""
        peers = list(self._peers.values())
        self._peers.clear()
        await asyncio.gather(*(peer.channel.close(None) for peer in peers), *self._closing)

    def _peer(self, endpoint: str) -> _Peer:
        peer = self._peers.get(endpoint)
        if peer is None:
            self._drop_idle()
            peer = self._peers[endpoint] = _Peer(rpc.channel(endpoint))
        self._peers.move_to_end(endpoint)
        return peer

    def _drop_idle(self) -> None:
        idle = [endpoint for endpoint, peer in self._peers.items() if not peer.live]
        for endpoint in idle[: max(0, len(idle) - _MAX_IDLE_CHANNELS + 1)]:
            task = asyncio.create_task(_close(self._peers.pop(endpoint).channel))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _stream(self, peer: _Peer, call: aio.UnaryStreamCall[Any, Any]) -> WorkerStream[Any]:
        token = object()  # not the call itself: one that is forgotten is to be collected, which ends it
        peer.live.add(token)
        call.add_done_callback(lambda _call: peer.live.discard(token))
        return WorkerStream(call)


async def _close(channel: aio.Channel) -> None:
    await channel.close(None)


def _header(worker: WorkerAddress, router_epoch: int) -> pb.Header:
    return pb.Header(incarnation=worker.incarnation, router_epoch=router_epoch)
