"""Fills reserved blocks with a prompt's KV, whatever blocks the prefill worker has.

    equal layouts    the peer's blocks ──► our pool
    other layouts    the peer's blocks ──► a part of the staging area ──► repacked into our pool, and so on, part by part

Our blocks that are cached are shared, so they are never written: of a block of the peer's that reaches into them, only the tokens that
are missing are used. A part of the staging area belongs to one handoff from its read to the end of its repacking, however that ends.
A prompt that is still being computed is read behind its marks, in runs of whole blocks of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from cluster.engine.engine import Reservation
from cluster.errors import TicketMismatch, TransferError
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.copy_thread import CopyThread
from cluster.kv_transfer.repack import Repacker
from cluster.kv_transfer.staging import StagingArea
from cluster.worker.checksums import block_checksums

_SLICE_BYTES: Final = 4 * 2**20  # repacked before a cancel is looked for: a few milliseconds


class ReadablePeer(Protocol):
    """The part of `Peer` that a read needs."""

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where KV arrives: this worker's pool and what its blocks mean."""

    pool: torch.Tensor  # uint8 [num_blocks, block_bytes]
    layout: KVLayout
    checkpoint: str
    incarnation: str  # signs the commits
    zero_tail: Callable[[int, int], None]  # (block id, first token without KV)


@dataclass(frozen=True, slots=True)
class _Staged:
    """What blocks of one foreign layout pass through."""

    repacker: Repacker
    area: StagingArea


class BlockReader:
    """All reads of one decode worker. Use it on one event loop."""

    def __init__(self, destination: Destination, staging_bytes: int, *, checksums: bool, faults: FaultInjector = NO_FAULTS) -> None:
        """
        Args:
            destination: where blocks arrive.
            staging_bytes: of one staging area; there is one for each foreign layout that was met, made when it is first needed.
            checksums: offers will be completed with them.
            faults: at `fetch.chunk`.
        """
        self.destination = destination
        self.checksums = checksums
        self.faults = faults
        self._staging_bytes = staging_bytes
        self._staged: dict[KVLayout, _Staged] = {}
        self._thread = CopyThread("kv-repack")

    def begin(self, peer: ReadablePeer, ticket: KVTicket, reservation: Reservation) -> BlockReading:
        """The read of one handoff, of which nothing has been read yet.

        Raises:
            TicketMismatch: the ticket's blocks cannot become ours.
        """
        return BlockReading(self, peer, ticket, reservation)

    def staged_for(self, source: KVLayout) -> _Staged | None:
        """What blocks of `source` have to pass through; None when they are as ours.

        Raises:
            TicketMismatch: they cannot become ours.
        """
        if source == self.destination.layout:
            return None
        if source not in self._staged:
            repacker = Repacker(source, self.destination.layout)
            area = StagingArea(source.block_bytes, self._staging_bytes, multiple=repacker.source_blocks_per_unit)
            self._staged[source] = _Staged(repacker, area)
        return self._staged[source]

    async def in_thread(self, work: Callable[[], None]) -> None:
        """Runs `work` on blocks, off the event loop; see `CopyThread.run`."""
        await self._thread.run(work)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.close()


class BlockReading:
    """One handoff: what is not cached, in runs from the first block to the last. When a call ends, nothing is written any more."""

    def __init__(self, reader: BlockReader, peer: ReadablePeer, ticket: KVTicket, reservation: Reservation) -> None:
        self._reader = reader
        self._peer = peer
        self._ticket = ticket
        self._reservation = reservation
        self._staged = reader.staged_for(ticket.layout)
        self._unit = 1 if self._staged is None else self._staged.repacker.source_blocks_per_unit
        num_cached_tokens = reservation.num_cached_blocks * reader.destination.layout.block_size
        is_cached = num_cached_tokens >= ticket.num_tokens
        self._first = len(ticket.blocks) if is_cached else num_cached_tokens // ticket.layout.block_size
        self._next = self._first
        self._checksums: dict[int, int] = {}  # by position in the ticket

    async def read_ready(self, num_ready_tokens: int) -> None:
        """Brings the blocks that the first `num_ready_tokens` fill, as far as they fill blocks of ours.

        Raises:
            TransferError: blocks did not arrive.
        """
        await self._read_to(num_ready_tokens // self._ticket.layout.block_size // self._unit * self._unit)

    async def finish(self, ticket: KVTicket) -> int:
        """Brings the rest; `ticket` is the complete one. The number of the peer's blocks that travelled.

        Raises:
            TransferError: blocks did not arrive, or arrived damaged.
            TicketMismatch: the offer was completed with checksums, which were not to come.
        """
        await self._read_to(len(ticket.blocks))
        if ticket.checksums and len(self._checksums) < len(ticket.blocks) - self._first:
            raise TicketMismatch("the ticket has checksums, which this worker's config does not ask for", param="checksums")
        if not self._ticket.checksums:  # else they were compared as they came
            _verify(ticket, self._checksums)
        num_tail_tokens = ticket.num_tokens % self._reader.destination.layout.block_size
        if num_tail_tokens and self._first < len(ticket.blocks):
            self._reader.destination.zero_tail(self._reservation.block_ids[-1], num_tail_tokens)
        return len(ticket.blocks) - self._first

    async def _read_to(self, end: int) -> None:
        if end <= self._next:
            return
        indexes = range(self._next, end)
        if self._staged is None:
            await self._read(indexes, self._reader.destination.pool, self._reservation.block_ids[indexes.start : indexes.stop])
        else:
            await self._read_staged(self._staged, indexes)
        self._next = end

    async def _read_staged(self, staged: _Staged, indexes: range) -> None:
        slice_rows = max(1, _SLICE_BYTES // (self._unit * staged.repacker.source.block_bytes)) * self._unit
        for start in range(indexes.start, indexes.stop, staged.area.part_rows):
            part = range(start, min(start + staged.area.part_rows, indexes.stop))
            async with staged.area.part() as first_row:
                rows = range(first_row, first_row + len(part))
                await self._read(part, staged.area.blocks, rows)
                for offset in range(0, len(part), slice_rows):
                    end = min(offset + slice_rows, len(part))
                    blocks = staged.area.blocks[rows[offset] : rows[end - 1] + 1]
                    await self._reader.in_thread(lambda blocks=blocks, index=part[offset]: self._repack(staged.repacker, blocks, index))  # type: ignore[misc]

    async def _read(self, indexes: range, destination: torch.Tensor, rows: Sequence[int]) -> None:
        await self._peer.read(self._ticket, indexes, destination, rows)
        await self._reader.faults.arrive(FaultPoint.FETCH_CHUNK, destination, rows)
        if self._reader.checksums or self._ticket.checksums:  # now: staged blocks are gone when an offer's complete ticket comes
            found = dict(zip(indexes, await block_checksums(destination, rows), strict=True))
            _verify(self._ticket, found)
            self._checksums |= found

    def _repack(self, repacker: Repacker, blocks: torch.Tensor, index: int) -> None:
        """`blocks` are the peer's from the ticket's position `index` on."""
        repacked = repacker.repack(blocks)
        first = index * repacker.source.block_size // repacker.destination.block_size  # position of the first repacked block in the prompt
        block_ids = self._reservation.block_ids
        missing = range(max(first, self._reservation.num_cached_blocks), min(first + len(repacked), len(block_ids)))
        rows = torch.tensor([block_ids[position] for position in missing], dtype=torch.int64)
        self._reader.destination.pool.index_copy_(0, rows, repacked[missing.start - first : missing.stop - first])


def _verify(ticket: KVTicket, found: Mapping[int, int]) -> None:
    """Compares what was `found` of blocks, by position in the ticket, with the ticket, where it has checksums."""
    damaged = [index for index, checksum in found.items() if checksum != ticket.checksums[index]] if ticket.checksums else []
    if damaged:
        raise TransferError(f"blocks {damaged} of {ticket.key} arrived damaged", param="checksums")
