"""What a data plane is: one way for a decode worker to read KV blocks out of a prefill worker's pool.

Life of a handoff, seen from the reader (the decode worker's Intake):

    1. describe  the peer's KV service says who it is, its layout and what each of its planes needs to be reached
    2. connect   the first plane of the config that both have and that can reach the peer; kept per incarnation
    3. read      whole blocks, from the ticket's positions into our own block ids; may be repeated until the commit
    4. release   KV.Release is the commit: only after VALID may a decode step use what was read (promise P3)

Planes move bytes and know nothing of tickets' validity: the owner checks the ticket where it is asked (`TicketChecker`), and the
commit settles races with a lease that ran out during a one-sided read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.kv_ticket import KVTicket


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """A prefill worker, as its KV service describes it."""

    endpoint: str
    incarnation: str
    layout: str  # fingerprint
    checkpoint: str
    domain: str
    planes: dict[str, bytes]


class TicketChecker(Protocol):
    """Who decides whether a ticket is good: the prefill worker's Outbox."""

    def check(self, ticket: KVTicket) -> None:
        """Raises:
        TicketStale: the lease is over.
        TicketMismatch: the ticket is not what was offered; names the field.
        """

    def renew(self, key: str, nonce: bytes) -> float | None:
        """Extends the lease; the seconds left, or None when it is over."""

    def release(self, key: str, nonce: bytes, taker: str) -> bool:
        """The commit. True (valid) ends the lease; the same taker may ask again and gets the same answer."""


class Connection(ABC):
    """A data plane's link to one life of one peer."""

    @abstractmethod
    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies blocks of the peer into ours; blocking copies run off the event loop and release the GIL.

        Args:
            ticket: names the peer's blocks.
            indexes: positions in `ticket.blocks` to read.
            destination: our pool, uint8 `[num_blocks, block_bytes]`.
            block_ids: rows of `destination`, one for each of `indexes`.

        Raises:
            TransferError: the bytes did not arrive; what is in `destination` is undefined.
        """

    @abstractmethod
    async def close(self) -> None:
        """Frees what the link holds (mappings, channels). Idempotent."""


class DataPlane(ABC):
    """One worker's end of a plane: makes its own pool readable and connects to those of peers."""

    name: str

    @abstractmethod
    async def publish(self) -> bytes:
        """Makes our pool readable; what `connect` needs on the other side (it travels in `DescribeReply.planes`)."""

    @abstractmethod
    async def connect(self, peer: PeerDescription) -> Connection:
        """Raises:
        PlaneUnavailable: this pair cannot use the plane; the message says why.
        """

    @abstractmethod
    async def close(self) -> None:
        """Withdraws the pool and frees everything. Idempotent."""
