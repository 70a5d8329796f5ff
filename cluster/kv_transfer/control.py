"""The reader's side of the KV service: who a prefill worker is, and its leases. Small calls on a channel apart from the blocks'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc
from grpc import aio

from cluster import rpc, wire
from cluster.errors import BatonError, ClientGone, DeadlineExceeded, NoCapacity, TicketMismatch, TransferError, WrongIncarnation
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import PeerDescription, Progress
from cluster.pb import worker_pb2 as pb
from cluster.pb import worker_pb2_grpc as stubs

PROTOCOL_VERSION: Final = 2  # of KV control and of what the planes publish; raised with every change that an older reader would misread

_TIMEOUT_S: Final = 5.0
_T = TypeVar("_T")


def transfer_error(error: BatonError) -> BatonError:
    """What a failed call to a prefill worker means for a handoff: the worker's own words stay, a lost connection is a TransferError."""
    if type(error) in (NoCapacity, DeadlineExceeded, ClientGone):
        return TransferError(f"the prefill worker does not answer: {error.message}")
    return error


class KVControlClient:
    """Control calls to one life of one prefill worker. Every method may raise WrongIncarnation, Unauthorized and TransferError."""

    def __init__(self, endpoint: str, incarnation: str, secret: str, faults: FaultInjector = NO_FAULTS) -> None:
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._header = pb.Header(incarnation=incarnation)
        self._metadata = rpc.secret_metadata(secret)
        self._channel = rpc.channel(endpoint, *rpc.KEEPALIVE)
        self._stub = stubs.KVStub(self._channel)
        self._faults = faults
        self._closed = asyncio.Event()

    async def describe(self) -> PeerDescription:
        """Who answers at the endpoint.

        Raises:
            TransferError: it speaks another version of the protocol (`param` is `protocol_version`).
            WrongIncarnation: the endpoint belongs to another life.
        """
        request = pb.DescribeRequest(protocol_version=PROTOCOL_VERSION)
        reply = await self._call(self._stub.Describe, request)
        check_version(reply.protocol_version)
        if reply.incarnation != self._incarnation:
            raise WrongIncarnation(f"{self._endpoint} is now incarnation {reply.incarnation}", param="incarnation")
        try:
            layout = wire.decode(KVLayout, reply.layout)
        except wire.WireError as error:
            raise TransferError(f"the prefill worker describes its blocks wrongly: {error}", param="layout") from error
        return PeerDescription(self._endpoint, reply.incarnation, layout, reply.checkpoint, reply.domain, dict(reply.planes))

    async def renew(self, ticket: KVTicket) -> float | None:
        """Extends the lease; the seconds left, or None when it is over."""
        request = pb.RenewRequest(header=self._header, ticket=_name(ticket))
        reply = await self._call(self._stub.Renew, request)
        return reply.lease_s if reply.state == pb.LEASE_STATE_VALID else None

    async def release(self, ticket: KVTicket, taker: str) -> bool:
        """The commit; True: what was read is good. A lost answer is asked for once more, since `taker` gets the same one.

        Raises:
            TicketMismatch: the owner offered another ticket than this.
        """
        request = pb.ReleaseRequest(header=self._header, ticket=_name(ticket), digest=ticket.digest(), taker=taker)
        try:
            reply = await self._commit(request)
        except TicketMismatch:
            raise
        except TransferError:
            reply = await self._commit(request)
        return reply.state == pb.LEASE_STATE_VALID

    async def follow(self, ticket: KVTicket) -> AsyncGenerator[Progress, None]:
        """How far the prompt of the offer `ticket` is computed; the last item has the complete ticket.

        Raises:
            TicketStale: the offer has ended, or the lease.
            TicketMismatch: what came as a ticket is none.
        """
        self._check_open()
        call = self._stub.Follow(pb.FollowRequest(header=self._header, ticket=_name(ticket)), metadata=self._metadata)
        try:
            while True:
                with transfer_errors():
                    message = await rpc.read(call)
                if message is None:
                    return
                yield Progress(message.num_ready_tokens, KVTicket.unpack(message.ticket) if message.ticket else None)
        finally:
            call.cancel()

    async def wait_lost(self) -> None:
        """Returns when the connection, which a call has opened, is lost or closed."""
        # Closing a channel ends the watch of it only when the last object of its calls is collected.
        watch = asyncio.ensure_future(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait((watch, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            closed.cancel()

    async def close(self) -> None:
        """Calls in progress end with TransferError. Idempotent."""
        self._closed.set()
        await self._channel.close(None)

    async def _commit(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        await self._faults.reach(FaultPoint.COMMIT)
        return await self._call(self._stub.Release, request)

    async def _call(self, method: Callable[..., aio.UnaryUnaryCall[Any, _T]], request: object) -> _T:
        self._check_open()
        with transfer_errors():
            return await method(request, metadata=self._metadata, timeout=_TIMEOUT_S)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransferError("the connection to the prefill worker is closed")


def check_version(version: int) -> None:
    """Raises:
    TransferError: `version` is not ours.
    """
    if version != PROTOCOL_VERSION:
        raise TransferError(f"KV protocol version {version}, this worker speaks {PROTOCOL_VERSION}", param="protocol_version")


def _name(ticket: KVTicket) -> pb.TicketName:
    return pb.TicketName(request_id=ticket.request_id, attempt=ticket.attempt, nonce=ticket.nonce)


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Around a call to a prefill worker: how it failed, as an error of the handoff."""
    try:
        yield
    except aio.AioRpcError as error:
        raise transfer_error(rpc.error_of(error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # not we were cancelled but the call, by the end of its channel
            raise TransferError("the connection to the prefill worker was closed") from None
        raise
