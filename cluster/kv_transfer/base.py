"""What a data plane is: one way for a decode worker to read KV blocks out of a prefill worker's pool.

Life of a handoff, seen from the reader (the decode worker's Intake):

    1. describe  the peer's KV service says who it is, its layout and what each of its planes needs to be reached
    2. connect   the first plane of the config that both have and that can reach the peer; kept per incarnation
    3. follow    of a prompt that is offered and not computed yet: how far it is, and in the end the complete ticket
    4. read      whole blocks, from the ticket's positions into our own block ids; may be repeated until the commit, and may begin
                 with what is computed. Blocks of another layout than ours are read into a staging area and repacked from there (`repack`)
    5. release   KV.Release is the commit: only after VALID may a decode step use what was read (promise P3)

Planes move bytes and know nothing of tickets' validity: the owner checks the ticket where it is asked (`TicketChecker`), and the
commit settles races with a lease that ran out during a one-sided read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from cluster import wire
from cluster.errors import PlaneUnavailable, TicketMismatch
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """A prefill worker, as its KV service describes it."""

    endpoint: str
    incarnation: str
    layout: KVLayout
    checkpoint: str
    domain: str
    planes: dict[str, bytes]  # plane name → what its `connect` needs


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the KV of an offered prompt is computed."""

    num_ready_tokens: int
    ticket: KVTicket | None = None  # complete, once all is


class TicketChecker(Protocol):
    """Who decides whether a ticket is good: the prefill worker's Outbox."""

    def check(self, ticket: KVTicket, num_blocks: int) -> None:
        """Whether the first `num_blocks` of the ticket's blocks may be read now.

        Raises:
        TicketStale: the lease is over.
        TicketMismatch: the ticket is not what was offered, or the blocks are not computed yet; names the field.
        """

    def follow(self, key: str, nonce: bytes) -> AsyncGenerator[Progress, None]:
        """The progress of an offer: at once, at each mark, and in the end with the complete ticket. Of several marks the last says all.

        Raises:
        TicketStale: the offer or the lease is over.
        """

    def renew(self, key: str, nonce: bytes) -> float | None:
        """Extends the lease; the seconds left, or None when it is over."""

    def release(self, key: str, nonce: bytes, digest: bytes, taker: str) -> bool:
        """The commit. True (valid) ends the lease; the same taker may ask again and gets the same answer.

        Raises:
        TicketMismatch: `digest` is of another ticket than the one offered: what was read may be other blocks.
        """


class Connection(ABC):
    """A data plane's link to one life of one peer."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once `close` was called or the peer is known to be gone: nothing is held then, and every read fails."""

    @abstractmethod
    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies blocks of the peer into ours. Large copies run off the event loop and release the GIL.

        However it ends, cancelled too, nothing writes to `destination` any more once it has ended: the rows may be reused at once.

        Args:
            ticket: names the peer's blocks.
            indexes: positions in `ticket.blocks` to read.
            destination: uint8 `[num_rows, block_bytes]` with the peer's `block_bytes`: our pool, or a staging area that lives as long
                as this worker.
            block_ids: rows of `destination`, one for each of `indexes`.

        Raises:
            TransferError: the bytes did not arrive; what is in the rows is undefined.
            WrongIncarnation: the address belongs to another life of the peer.
        """

    @abstractmethod
    async def close(self) -> None:
        """Frees what the link holds (mappings, sockets, channels). Idempotent."""


class DataPlane(ABC):
    """One worker's end of a plane: makes its own pool readable and connects to those of peers."""

    name: ClassVar[str]

    @abstractmethod
    async def publish(self) -> bytes:
        """Makes our pool readable; returns what `connect` needs on the other side. Called once.

        Raises:
            PlaneUnavailable: our pool cannot be read this way; the message says why.
        """

    @abstractmethod
    async def connect(self, peer: PeerDescription) -> Connection:
        """Raises:
        PlaneUnavailable: this pair cannot use the plane; the message says why.
        """

    @abstractmethod
    async def close(self) -> None:
        """Withdraws the pool and frees everything. Idempotent."""


def described_pool(kind: type[T], plane: str, peer: PeerDescription) -> T:
    """What `peer` says of its pool on `plane`.

    Raises:
        PlaneUnavailable: it is no `kind`.
    """
    try:
        return wire.decode(kind, peer.planes[plane])
    except wire.WireError as error:
        raise PlaneUnavailable(f"the peer's description of its pool is no good: {error}") from error


def check_block_bytes(block_bytes: int, peer: PeerDescription) -> None:
    """Raises:
    TicketMismatch: blocks of `block_bytes`, as the plane found them, are not those of the peer's layout.
    """
    if block_bytes != peer.layout.block_bytes:
        raise TicketMismatch(f"blocks of {block_bytes} bytes, its layout has {peer.layout.block_bytes}", param="layout")


def source_rows(ticket: KVTicket, indexes: Sequence[int], num_blocks: int) -> list[int]:
    """Rows of the peer's pool (of `num_blocks`) that the ticket names at `indexes`.

    Raises:
        TicketMismatch: a position outside the ticket, or a block outside the pool.
    """
    if indexes and not 0 <= min(indexes) <= max(indexes) < len(ticket.blocks):
        raise TicketMismatch(f"the ticket has {len(ticket.blocks)} blocks, asked for positions up to {max(indexes)}", param="indexes")
    rows = [ticket.blocks[index].block_id for index in indexes]
    if rows and not 0 <= min(rows) <= max(rows) < num_blocks:
        raise TicketMismatch(f"the pool has {num_blocks} blocks, the ticket names block {max(rows)}", param="blocks")
    return rows
