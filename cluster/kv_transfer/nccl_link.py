"""The reader's end of NCCL: one communicator with one life of one owner, from `open` to `close` or to its first failure.

asked ──► refused: the ticket is not good, neither rank posts anything
   └────► go: both ranks post the group, in the order of the answers ──► done
            └── cancelled: what was asked for is taken all the same, since a rank that has posted its sends waits for us;
                a group that does not end soon then, or takes too long, breaks the communicator, and `connect` makes another
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cluster import wire
from cluster.errors import BatonError, PlaneUnavailable, TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Connection, PeerDescription, source_rows
from cluster.kv_transfer.nccl_device import GROUP_BYTES, MAX_GROUP_ROWS, READER_RANK, Device, NcclPool, Rows
from cluster.kv_transfer.nccl_rank import Posting, Rank
from cluster.kv_transfer.nccl_stream import NcclStream
from cluster.kv_transfer.outlast import outlast
from cluster.kv_transfer.patience import Patience
from cluster.kv_transfer.slices import in_slices
from cluster.pb import worker_pb2 as pb

_MAX_IN_FLIGHT: Final = 2  # groups: the second is asked for while the first is on its way
_STALL_S: Final = 10.0  # a group that takes longer will not end
_HURRY_S: Final = 1.0  # the same, once nobody wants it any more


@dataclass(frozen=True, slots=True)
class Reader:
    """What all links of one worker share."""

    device: Device
    memory: torch.device  # that the device's is to torch: there lie all destinations
    secret: str  # of the cluster
    token: torch.Tensor  # where an owner's arrives: uint8 `[1, token bytes]`, for who has the turn
    turn: asyncio.Lock  # who reads now; see `nccl_turns`


class NcclLink(Connection):
    """Of one pair."""

    def __init__(self, reader: Reader, peer: PeerDescription, source: NcclPool) -> None:
        """
        Args:
            reader: this worker.
            peer: the owner.
            source: what it says of its pool.
        """
        self._memory = reader.memory
        self._token = reader.token
        self._header = pb.Header(incarnation=peer.incarnation)
        self._source = source
        self._turn = reader.turn
        self._rank = Rank(reader.device)
        self._stream = NcclStream(peer.endpoint, reader.secret, lambda error: self._start_closing(error.message))
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._groups: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closing is not None

    async def open(self) -> None:
        """Makes the communicator, and brings the owner's token over it.

        Raises:
            BatonError: there is none, or it leads to somebody else; close the link then.
        """
        async with self._turn:
            opening = asyncio.create_task(self._open())
            self._groups.add(opening)
            opening.add_done_callback(self._groups.discard)
            try:
                await outlast(opening, lambda: self._start_closing("nobody wants the connection any more"))
            except BaseException:
                await asyncio.shield(self._start_closing("no communicator"))  # before somebody else's turn
                raise

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        assert len(indexes) == len(block_ids) and destination.shape[1] == self._source.block_bytes and destination.is_contiguous()
        self._check_open()
        source_rows(ticket, indexes, self._source.num_blocks)
        if destination.device != self._memory:
            raise TransferError(f"NCCL cannot write to {destination.device} memory, the pool is in that of {self._memory}")
        packed = wire.encode(ticket)

        async def read_slice(part: slice) -> None:
            fetch = pb.FetchRequest(header=self._header, ticket=packed, indexes=indexes[part])
            await self._read_group(pb.NcclRequest(fetch=fetch), Rows(destination, block_ids[part]))

        step = min(MAX_GROUP_ROWS, max(1, GROUP_BYTES // destination.shape[1]))
        async with self._turn:
            await in_slices(len(indexes), step, read_slice)

    async def close(self) -> None:
        await asyncio.shield(self._start_closing("the connection is closed"))
        while self._groups:
            await asyncio.wait(list(self._groups))

    async def _open(self) -> None:
        request = pb.NcclRequest(join=pb.NcclJoin(header=self._header))
        joining = await self._stream.ask(request, lambda go: self._rank.join(go.unique_id, READER_RANK), Patience(_STALL_S))
        if isinstance(joining, BatonError):
            raise joining
        await self._rank.wait_joined(joining)
        await self._rank.post(receive=Rows(self._token, [0])).wait(Patience(_STALL_S))
        arrived = await self._rank.run(lambda: self._token.cpu().numpy().tobytes())  # off the event loop: it waits for the device
        if arrived != self._source.token:
            raise PlaneUnavailable("the communicator leads to another pool than the peer's")

    async def _read_group(self, request: pb.NcclRequest, rows: Rows) -> None:
        """Asks for a group and outlasts it, whatever happens to us meanwhile."""
        async with self._slots:
            self._check_open()
            patience = Patience(_STALL_S, _HURRY_S)
            group = asyncio.create_task(self._receive(request, rows, patience))
            self._groups.add(group)
            group.add_done_callback(self._groups.discard)
            await outlast(group, patience.hurry)

    async def _receive(self, request: pb.NcclRequest, rows: Rows, patience: Patience) -> None:
        try:
            answer = await self._stream.ask(request, lambda _: self._rank.post(receive=rows), patience)
            if isinstance(answer, Posting):
                await answer.wait(patience)
        except BatonError as error:
            await self._start_closing(error.message)  # until then the device may write
            raise
        if isinstance(answer, BatonError):
            raise answer

    def _check_open(self) -> None:
        if self.closed:
            raise TransferError("the connection to the peer is closed")

    def _start_closing(self, reason: str) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(reason))
        return self._closing

    async def _close(self, reason: str) -> None:
        await self._rank.abort(reason)
        await self._stream.close()
