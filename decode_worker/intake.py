"""Brings a prompt's KV into this worker's pool (promise P3).

    ticket ──► checked ──► reserved ──► read ──► verified ──► committed ──► the engine may decode
                  │           │          └───────────┴─────────────┴── any failure, any cancel: our blocks go free
                  │           └── no room: declined, nothing was read, the ticket is still good
                  └── does not fit the request or this worker: TicketMismatch

Until the commit the prefill worker's lease is renewed, so a long read does not cost the prompt. Only blocks that are not cached here
travel. Nothing that was read is used before the prefill worker has answered *valid*: a read can race the end of the lease, and the
commit tells. Each intake commits in a name of its own, so a ticket that was taken is stale even for the worker that took it. Blocks go
free only after the read that fills them has ended (`Connection.read` promises that no write comes after), so a cancelled read never
writes into another sequence's blocks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.engine.engine import Reservation
from cluster.errors import BatonError, TicketMismatch, TicketStale, TransferError, WrongIncarnation
from cluster.kv_ticket import KVLayout, KVTicket
from cluster.types import Request
from cluster.worker.checksums import block_checksums

_log = logging.getLogger(__name__)


class IntakeEngine(Protocol):
    """The part of `EngineLoop` that the intake needs."""

    async def reserve(self, request: Request, ticket_domain: str, num_tokens: int) -> Reservation | None: ...

    def abort(self, key: str) -> None: ...


class IntakePeer(Protocol):
    """The part of `Peer` that the intake needs."""

    @property
    def plane(self) -> str: ...

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None: ...

    async def renew(self, ticket: KVTicket) -> float | None: ...

    async def release(self, ticket: KVTicket, taker: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where KV arrives: this worker's pool and what its blocks mean."""

    pool: torch.Tensor  # uint8 [num_blocks, block_bytes]
    layout: KVLayout
    checkpoint: str
    incarnation: str  # signs the commits
    zero_tail: Callable[[int, int], None]  # (block id, first token without KV)


@dataclass(frozen=True, slots=True)
class Taken:
    """KV that is ours: the reservation holds a whole prompt, and the prefill worker's copy is free."""

    reservation: Reservation
    plane: str
    num_bytes: int
    wait_s: float  # from the call until blocks were reserved
    transfer_s: float  # reading and commit


class Intake:
    """All handoffs into one decode worker. Use it on one event loop."""

    def __init__(
        self,
        engine: IntakeEngine,
        destination: Destination,
        peer_of: Callable[[KVTicket], Awaitable[IntakePeer]],
        renew_interval_s: float,
    ) -> None:
        """
        Args:
            engine: whose pool is filled.
            destination: that pool.
            peer_of: the worker that issued a ticket (`Peers.get`).
            renew_interval_s: how often a lease is renewed until the commit.
        """
        self._engine = engine
        self._destination = destination
        self._peer_of = peer_of
        self._renew_interval_s = renew_interval_s
        self._taking: set[str] = set()

    def __len__(self) -> int:
        """Handoffs under way."""
        return len(self._taking)

    async def take(self, request: Request, ticket: KVTicket) -> Taken | None:
        """The KV of `ticket`, committed; None when there is no room now. If it raises, nothing is held here.

        Raises:
            TicketMismatch: the ticket is not for this request or this worker; names the field.
            TicketStale: the lease ended before the commit, or the prefill worker is no more.
            TransferError: the blocks did not arrive whole.
            RequestError: the request does not fit this worker.
        """
        started_s = time.monotonic()
        self._check(request, ticket)
        self._taking.add(request.key)
        try:
            reservation = await self._engine.reserve(request, ticket.domain, ticket.num_tokens)
            if reservation is None:
                return None
            reserved_s = time.monotonic()
            with _errors_of_peer():
                plane, num_blocks = await self._fetch(ticket, reservation)
        except BaseException:
            self._engine.abort(request.key)
            raise
        finally:
            self._taking.discard(request.key)
        num_bytes = num_blocks * self._destination.layout.block_bytes
        return Taken(reservation, plane, num_bytes, reserved_s - started_s, time.monotonic() - reserved_s)

    def _check(self, request: Request, ticket: KVTicket) -> None:
        layout = self._destination.layout
        expected = {
            "request_id": (ticket.request_id, request.request_id),
            "attempt": (ticket.attempt, request.attempt),
            "num_tokens": (ticket.num_tokens, request.num_prompt_tokens),
            "layout": (ticket.layout, layout.fingerprint()),
            "checkpoint": (ticket.checkpoint, self._destination.checkpoint),
            "blocks": (len(ticket.blocks), layout.num_blocks_for(ticket.num_tokens)),
            "checksums": (len(ticket.checksums), len(ticket.blocks) if ticket.checksums else 0),
            "first_token": (ticket.first_token is not None, True),
        }
        for field, (found, wanted) in expected.items():
            if found != wanted:
                raise TicketMismatch(f"the ticket's {field} does not fit: {found}, here {wanted}", param=field)

    async def _fetch(self, ticket: KVTicket, reservation: Reservation) -> tuple[str, int]:
        """Reads what is missing and commits; the plane and the number of blocks read."""
        indexes = range(reservation.num_cached_blocks, len(ticket.blocks))
        block_ids = [reservation.block_ids[index] for index in indexes]
        taker = f"{self._destination.incarnation}/{secrets.token_hex(8)}"
        peer = await self._peer_of(ticket)
        async with self._renewing(peer, ticket):
            if block_ids:
                await peer.read(ticket, indexes, self._destination.pool, block_ids)
                await self._finish_blocks(ticket, indexes, block_ids)
            if not await peer.release(ticket, taker):
                raise TicketStale(f"the lease of {ticket.key} ended before the commit")
        return peer.plane, len(block_ids)

    async def _finish_blocks(self, ticket: KVTicket, indexes: Sequence[int], block_ids: Sequence[int]) -> None:
        if ticket.checksums:
            found = await block_checksums(self._destination.pool, block_ids)
            damaged = [index for index, checksum in zip(indexes, found, strict=True) if checksum != ticket.checksums[index]]
            if damaged:
                raise TransferError(f"blocks {damaged} of {ticket.key} arrived damaged", param="checksums")
        num_tail_tokens = ticket.num_tokens % self._destination.layout.block_size
        if num_tail_tokens:
            self._destination.zero_tail(block_ids[-1], num_tail_tokens)

    @asynccontextmanager
    async def _renewing(self, peer: IntakePeer, ticket: KVTicket) -> AsyncIterator[None]:
        renewal = asyncio.create_task(self._renew(peer, ticket))
        try:
            yield
        finally:
            renewal.cancel()

    async def _renew(self, peer: IntakePeer, ticket: KVTicket) -> None:
        """Renews until cancelled. What a failure means, the commit will say."""
        while True:
            await asyncio.sleep(self._renew_interval_s)
            try:
                left_s = await peer.renew(ticket)
            except BatonError as error:
                _log.warning("the lease of %s was not renewed: %s", ticket.key, error)
                continue
            if left_s is None:
                return


@contextmanager
def _errors_of_peer() -> Iterator[None]:
    """A prefill worker's refusal of us must not read as our refusal of the gateway's call."""
    try:
        yield
    except TransferError:
        raise
    except WrongIncarnation as error:
        raise TicketStale(f"the prefill worker of the ticket is no more: {error.message}") from error
    except BatonError as error:
        raise TransferError(f"the prefill worker refused: {error.message}") from error
