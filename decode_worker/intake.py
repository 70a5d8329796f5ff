"""Brings a prompt's KV into this worker's pool (promise P3).

    ticket ──► checked ──► reserved ──► read ──► verified ──► committed ──► the engine may decode
                  │           │          └───────────┴─────────────┴── any failure, any cancel: our blocks go free
                  │           └── no room: declined, nothing was read, the ticket is still good
                  └── does not fit the request or this worker: TicketMismatch

A ticket without a first token is an offer: its prompt is still being computed. Then the read keeps up with the computing (`Follower`), and
what is left for the time after the first token is the last blocks and the commit.

Until the commit the prefill worker's lease is renewed, so a long read does not cost the prompt. Only what is not cached here travels
(`BlockReader`). Nothing that was read is used before the prefill worker has answered *valid*: a read can race the end of the lease, and
the commit tells. Each intake commits in a name of its own, so a ticket that was taken is stale even for the worker that took it. Blocks
go free only after the read that fills them has ended (`Connection.read` promises that no write comes after), so a cancelled read never
writes into another sequence's blocks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.config import TransferConfig
from cluster.engine.engine import Reservation
from cluster.errors import BatonError, TicketMismatch, TicketStale, TransferError, WrongIncarnation
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.faults.points import FaultPoint
from cluster.kv_layout import why_no_handover
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Progress
from cluster.types import Request, TokenOutput
from decode_worker.block_reader import BlockReader, BlockReading, Destination, ReadablePeer
from decode_worker.follower import Follower

_log = logging.getLogger(__name__)


class IntakeEngine(Protocol):
    """The part of `EngineLoop` that the intake needs."""

    async def reserve(self, request: Request, ticket_domain: str, num_tokens: int) -> Reservation | None: ...

    def abort(self, key: str) -> None: ...


class IntakePeer(ReadablePeer, Protocol):
    """The part of `Peer` that the intake needs."""

    @property
    def plane(self) -> str: ...

    def follow(self, ticket: KVTicket) -> AsyncGenerator[Progress, None]: ...

    async def renew(self, ticket: KVTicket) -> float | None: ...

    async def release(self, ticket: KVTicket, taker: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """KV that is ours: the reservation holds a whole prompt, and the prefill worker's copy is free."""

    reservation: Reservation
    first_token: TokenOutput
    plane: str
    num_bytes: int
    wait_s: float  # from the call until blocks were reserved
    transfer_s: float  # reading and commit, from when blocks were reserved and the whole prompt was computed


@dataclass(frozen=True, slots=True)
class _Fetched:
    ticket: KVTicket  # complete
    plane: str
    num_blocks: int  # that travelled
    completed_s: float  # `time.monotonic()` when an offer was complete; 0 for a ticket that came complete


class Intake:
    """All handoffs into one decode worker. Use it on one event loop."""

    def __init__(
        self,
        engine: IntakeEngine,
        destination: Destination,
        peer_of: Callable[[KVTicket], Awaitable[IntakePeer]],
        transfer: TransferConfig,
        faults: FaultInjector = NO_FAULTS,
    ) -> None:
        """
        Args:
            engine: whose pool is filled.
            destination: that pool.
            peer_of: the worker that issued a ticket (`Peers.get`).
            transfer: how often a lease is renewed until the commit, how much memory blocks are repacked in, and whether tickets have
                checksums.
            faults: at `fetch.start` and `fetch.chunk`.
        """
        self._engine = engine
        self._destination = destination
        self._peer_of = peer_of
        self._renew_interval_s = transfer.renew_interval_s
        self._faults = faults
        self._reader = BlockReader(destination, transfer.staging_bytes, checksums=transfer.checksums, faults=faults)
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
            reservation = await self._engine.reserve(request, self._domain(ticket), ticket.num_tokens)
            if reservation is None:
                return None
            reserved_s = time.monotonic()
            fetched = await self._fetch_or_free(ticket, reservation)
        finally:
            self._taking.discard(request.key)
        first_token = fetched.ticket.first_token
        assert first_token is not None, "a complete ticket"
        num_bytes = fetched.num_blocks * ticket.layout.block_bytes
        transfer_s = time.monotonic() - max(reserved_s, fetched.completed_s)
        return Taken(reservation, first_token, fetched.plane, num_bytes, reserved_s - started_s, transfer_s)

    def close(self) -> None:
        """Call it when nothing is under way any more. Idempotent."""
        self._reader.close()

    def _domain(self, ticket: KVTicket) -> str:
        """Of the KV as it will lie here. Rounded to fewer bits it is that of the pair: of neither side's own KV, nor equal to it."""
        found, ours = ticket.layout.kv_dtype, self._destination.layout.kv_dtype
        return ticket.domain if found == ours else f"{ticket.domain}-to-{ours}"

    def _check(self, request: Request, ticket: KVTicket) -> None:
        reason = why_no_handover(ticket.layout, self._destination.layout)
        if reason is not None:
            raise TicketMismatch(f"the ticket's blocks cannot become ours: {reason}", param="layout")
        expected = {
            "request_id": (ticket.request_id, request.request_id),
            "attempt": (ticket.attempt, request.attempt),
            "num_tokens": (ticket.num_tokens, request.num_prompt_tokens),
            "checkpoint": (ticket.checkpoint, self._destination.checkpoint),
            "blocks": (len(ticket.blocks), ticket.layout.num_blocks_for(ticket.num_tokens)),
            "checksums": (len(ticket.checksums), len(ticket.blocks) if ticket.checksums else 0),
        }
        for field, (found, wanted) in expected.items():
            if found != wanted:
                raise TicketMismatch(f"the ticket's {field} does not fit: {found}, here {wanted}", param=field)

    async def _fetch_or_free(self, ticket: KVTicket, reservation: Reservation) -> _Fetched:
        try:
            with _errors_of_peer():
                return await self._fetch(ticket, reservation)
        except BaseException:
            self._engine.abort(reservation.key)
            raise

    async def _fetch(self, ticket: KVTicket, reservation: Reservation) -> _Fetched:
        """Reads what is missing and commits."""
        taker = f"{self._destination.incarnation}/{secrets.token_hex(8)}"
        peer = await self._peer_of(ticket)
        async with self._renewing(peer, ticket):
            await self._faults.reach(FaultPoint.FETCH_START)
            reading = self._reader.begin(peer, ticket, reservation)
            completed_s = 0.0
            if ticket.first_token is None:
                ticket, completed_s = await _keep_up(peer, ticket, reading)
            num_blocks = await reading.finish(ticket)
            if not await peer.release(ticket, taker):
                raise TicketStale(f"the lease of {ticket.key} ended before the commit")
        return _Fetched(ticket, peer.plane, num_blocks, completed_s)

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


async def _keep_up(peer: IntakePeer, offer: KVTicket, reading: BlockReading) -> tuple[KVTicket, float]:
    """Reads behind the marks; the complete ticket, and when it came."""
    async with Follower(peer.follow(offer)) as follower:
        while (progress := await follower.next()).ticket is None:
            await reading.read_ready(progress.num_ready_tokens)
    _check_completes(progress.ticket, offer)
    return progress.ticket, follower.completed_s


def _check_completes(ticket: KVTicket, offer: KVTicket) -> None:
    if ticket.first_token is None:
        raise TicketMismatch("the complete ticket has no first token", param="first_token")
    if len(ticket.checksums) not in (0, len(ticket.blocks)):
        raise TicketMismatch(f"the ticket has {len(ticket.checksums)} checksums of {len(ticket.blocks)} blocks", param="checksums")
    ticket.as_offered().check_is(offer.as_offered())


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
