"""Fills reserved blocks with a prompt's KV, whatever blocks the prefill worker has.

    equal layouts    the peer's blocks ──► our pool
    other layouts    the peer's blocks ──► a part of the staging area ──► repacked into our pool, and so on, part by part

Our blocks that are cached are shared, so they are never written: of a block of the peer's that reaches into them, only the tokens that
are missing are used. A part of the staging area belongs to one handoff from its read to the end of its repacking, however that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from cluster.engine.engine import Reservation
from cluster.errors import TransferError
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

    def __init__(self, destination: Destination, staging_bytes: int) -> None:
        """`staging_bytes`: of one staging area; there is one for each foreign layout that was met, made when it is first needed."""
        self._destination = destination
        self._staging_bytes = staging_bytes
        self._staged: dict[KVLayout, _Staged] = {}
        self._thread = CopyThread("kv-repack")

    async def read(self, peer: ReadablePeer, ticket: KVTicket, reservation: Reservation) -> int:
        """Brings what is not cached; the number of the peer's blocks that travelled. When it ends, nothing is written any more.

        Raises:
            TransferError: blocks did not arrive, or arrived damaged.
            TicketMismatch: the ticket's blocks cannot become ours.
        """
        layout = self._destination.layout
        first_token = reservation.num_cached_blocks * layout.block_size
        if first_token >= ticket.num_tokens:
            return 0
        indexes = range(first_token // ticket.layout.block_size, len(ticket.blocks))
        if ticket.layout == layout:
            await self._read(peer, ticket, indexes, self._destination.pool, reservation.block_ids[indexes.start :])
        else:
            await self._read_staged(peer, ticket, indexes, reservation)
        num_tail_tokens = ticket.num_tokens % layout.block_size
        if num_tail_tokens:
            self._destination.zero_tail(reservation.block_ids[-1], num_tail_tokens)
        return len(indexes)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.close()

    async def _read_staged(self, peer: ReadablePeer, ticket: KVTicket, indexes: range, reservation: Reservation) -> None:
        staged = self._staged_for(ticket.layout)
        for start in range(indexes.start, indexes.stop, staged.area.part_rows):
            part = range(start, min(start + staged.area.part_rows, indexes.stop))
            async with staged.area.part() as first_row:
                rows = range(first_row, first_row + len(part))
                await self._read(peer, ticket, part, staged.area.blocks, rows)
                for offset in range(0, len(part), self._slice_rows(staged.repacker)):
                    end = min(offset + self._slice_rows(staged.repacker), len(part))
                    blocks = staged.area.blocks[rows[offset] : rows[end - 1] + 1]
                    await self._thread.run(
                        lambda blocks=blocks, index=part[offset]: self._repack(staged.repacker, blocks, index, reservation)  # type: ignore[misc]
                    )

    async def _read(
        self, peer: ReadablePeer, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, rows: Sequence[int]
    ) -> None:
        await peer.read(ticket, indexes, destination, rows)
        if not ticket.checksums:
            return
        found = await block_checksums(destination, rows)
        damaged = [index for index, checksum in zip(indexes, found, strict=True) if checksum != ticket.checksums[index]]
        if damaged:
            raise TransferError(f"blocks {damaged} of {ticket.key} arrived damaged", param="checksums")

    def _repack(self, repacker: Repacker, blocks: torch.Tensor, index: int, reservation: Reservation) -> None:
        """`blocks` are the peer's from the ticket's position `index` on."""
        repacked = repacker.repack(blocks)
        first = index * repacker.source.block_size // repacker.destination.block_size  # position of the first repacked block in the prompt
        missing = range(max(first, reservation.num_cached_blocks), min(first + len(repacked), len(reservation.block_ids)))
        block_ids = torch.tensor([reservation.block_ids[position] for position in missing], dtype=torch.int64)
        self._destination.pool.index_copy_(0, block_ids, repacked[missing.start - first : missing.stop - first])

    def _staged_for(self, source: KVLayout) -> _Staged:
        if source not in self._staged:
            repacker = Repacker(source, self._destination.layout)
            area = StagingArea(source.block_bytes, self._staging_bytes, multiple=repacker.source_blocks_per_unit)
            self._staged[source] = _Staged(repacker, area)
        return self._staged[source]

    def _slice_rows(self, repacker: Repacker) -> int:
        unit = repacker.source_blocks_per_unit
        return max(1, _SLICE_BYTES // (unit * repacker.source.block_bytes)) * unit
