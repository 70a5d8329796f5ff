"""The owner's end of NCCL: for each reader one `KV.Nccl` call with one communicator, which sends what tickets allow.

The ticket is checked for each group when its turn has come, at the moment when it is posted. A lease that ends while the device is still
sending is told by the commit, as on one-sided planes.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final, Protocol

import torch
from grpc import aio

from cluster import rpc
from cluster.errors import BatonError, TicketMismatch, TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import TicketChecker, source_rows
from cluster.kv_transfer.nccl_device import MAX_GROUP_ROWS, OWNER_RANK, TOKEN_BYTES, Device, NcclPool, Rows
from cluster.kv_transfer.nccl_rank import Posting, Rank
from cluster.kv_transfer.nccl_turns import Turns
from cluster.kv_transfer.patience import Patience
from cluster.pb import worker_pb2 as pb

_STALL_S: Final = 10.0  # a group that the reader does not take for so long will not be taken
_END: Final[object] = aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_GO: Final = pb.NcclReply(go=pb.NcclGo())


class NcclCall(Protocol):
    """The part of a gRPC call that is served here: `aio.ServicerContext`."""

    async def read(self) -> Any: ...
    async def write(self, message: Any, /) -> None: ...


class NcclOwner:
    """All readers of one pool."""

    def __init__(self, device: Device, pool: torch.Tensor, incarnation: str) -> None:
        """
        Args:
            device: that `pool` lies on.
            pool: uint8 `[num_blocks, block_bytes]`. A block that a ticket names is complete on the device when the ticket may be read.
            incarnation: of this worker.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        self.description: Final = NcclPool(pool.shape[0], pool.shape[1], device.version, token)
        self._token = torch.frombuffer(bytearray(token), dtype=torch.uint8).view(1, -1).to(pool.device)
        self._device = device
        self._pool = pool
        self._incarnation = incarnation
        self._turns = Turns()
        self._ranks: set[Rank] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def serve(self, call: NcclCall, checker: TicketChecker) -> None:
        """One reader, until it ends the call. When this ends, however it does, the device has let go of its blocks.

        Raises:
            WrongIncarnation: the reader means another life of this worker.
            TransferError: the communicator broke, or this worker closes.
        """
        request = await call.read()
        if request is _END:
            return
        rpc.check_incarnation(request.join.header.incarnation, self._incarnation)
        if self._closed:
            raise TransferError("the worker closes")
        rank = Rank(self._device)
        self._ranks.add(rank)
        try:
            await self._join(call, rank)
            while (request := await _next(call, rank)) is not _END:
                await self._answer(call, rank, request.fetch, checker)
        finally:
            await rank.abort("the reader has ended the call")
            self._ranks.discard(rank)

    async def close(self) -> None:
        """Ends all calls. Idempotent."""
        self._closed = True
        for rank in list(self._ranks):
            await rank.abort("the worker closes")

    async def _join(self, call: NcclCall, rank: Rank) -> None:
        await self._turns.take(rank)
        try:
            unique_id = await Patience(_STALL_S).wait(rank.run(self._device.unique_id), "a name for the communicator", rank.ended)
            await call.write(pb.NcclReply(go=pb.NcclGo(unique_id=unique_id)))  # first: a reader that is gone does not join
            await rank.wait_joined(rank.join(unique_id, OWNER_RANK))
            await rank.post(send=Rows(self._token, [0])).wait(Patience(_STALL_S))
        except BaseException:
            await rank.abort("the reader has not joined")  # before somebody else's turn
            raise
        finally:
            self._turns.give()

    async def _answer(self, call: NcclCall, rank: Rank, fetch: pb.FetchRequest, checker: TicketChecker) -> None:
        """Posts one group, or refuses it."""
        await self._turns.take(rank)
        try:
            rows = self._rows(fetch, checker)
        except BatonError as error:
            self._turns.give()
            await call.write(pb.NcclReply(refusal=pb.NcclRefusal(code=error.code, message=error.message, param=error.param)))
            return
        sending = asyncio.create_task(self._send(rank.post(send=Rows(self._pool, rows))))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)
        await call.write(_GO)  # not before the ticket was good: a rank that waits on its device for sends that never come must be aborted

    async def _send(self, posting: Posting) -> None:
        try:
            await posting.wait(Patience(_STALL_S))
        finally:
            self._turns.give()

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # seen: `Posting.wait` has aborted the rank, which ends the call

    def _rows(self, fetch: pb.FetchRequest, checker: TicketChecker) -> list[int]:
        rpc.check_incarnation(fetch.header.incarnation, self._incarnation)
        if len(fetch.indexes) > MAX_GROUP_ROWS:
            raise TicketMismatch(f"{len(fetch.indexes)} blocks at once, NCCL takes {MAX_GROUP_ROWS}", param="indexes")
        ticket = KVTicket.unpack(fetch.ticket)
        checker.check(ticket, max(fetch.indexes, default=-1) + 1)
        return source_rows(ticket, fetch.indexes, self._pool.shape[0])


async def _next(call: NcclCall, rank: Rank) -> Any:
    """The reader's next request, or EOF.

    Raises:
        TransferError: the communicator was aborted.
    """
    reading = asyncio.ensure_future(call.read())
    try:
        await asyncio.wait([reading, rank.ended], return_when=asyncio.FIRST_COMPLETED)
        if rank.ended.done():
            raise TransferError(rank.ended.result())
        return reading.result()
    finally:
        reading.cancel()
