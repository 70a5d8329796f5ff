"""Prompts' KV that waits to be taken: the one place that says whether a ticket is good (promise P3).

    offered ── prompt computed ──► readable ── release, in time ──► taken     answer: valid
       │ ▲ mark                       ├── deadline passed ──► expired         answer: stale
       │ └─┘                          │
       └── withdrawn ◄────────────────┘ (the stream was cancelled)            answer: stale

While it is offered, the blocks below the mark may be read, so that a reader keeps up with the computing (`follow`); only the commit
needs the whole prompt.

The state changes first and the blocks are given back after, so nobody is told *valid* for blocks that may hold another prompt. A
lease's time runs from the moment it is readable: until then its blocks belong to a sequence that the engine is working on and whose
stream is open. All answers are given on the event loop at once; none waits for an engine step.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from cluster.config import TransferConfig
from cluster.errors import TicketMismatch, TicketStale
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Progress

_NUM_REMEMBERED: Final = 4096  # taken tickets whose taker may ask again


class LeaseEnd(StrEnum):
    """How a lease ended."""

    TAKEN = "taken"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


class Cancellable(Protocol):
    """A timer that has been set."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that leases need."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[str, bytes], None], key: str, nonce: bytes, /) -> Cancellable: ...
    def create_future(self) -> asyncio.Future[LeaseEnd]: ...


@dataclass(slots=True)
class _Lease:
    ticket: KVTicket
    end: asyncio.Future[LeaseEnd]
    num_ready_tokens: int = 0
    is_readable: bool = False
    deadline_s: float = 0.0
    last_deadline_s: float = 0.0  # no renewal goes beyond
    timer: Cancellable | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set once: each change has an event of its own

    def tell_followers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Outbox:
    """All leases of one prefill worker. Implements `cluster.kv_transfer.base.TicketChecker`. Use it on one event loop."""

    def __init__(self, config: TransferConfig, clock: Clock, free: Callable[[str], None], on_end: Callable[[LeaseEnd], None]) -> None:
        """
        Args:
            config: lease durations.
            clock: the running event loop.
            free: gives the blocks of a request key back; called once for every offer, whatever becomes of it.
            on_end: hears how each lease ended, after `free`.
        """
        self._config = config
        self._clock = clock
        self._free = free
        self._on_end = on_end
        self._leases: dict[str, _Lease] = {}
        self._takers: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def __len__(self) -> int:
        """Offers and leases that have not ended."""
        return len(self._leases)

    def offer(self, ticket: KVTicket) -> None:
        """Promises the blocks of `ticket`, which has no first token yet. A key that is still offered is a bug of the caller."""
        assert ticket.key not in self._leases, ticket.key
        self._leases[ticket.key] = _Lease(ticket, self._clock.create_future())

    def mark(self, key: str, num_ready_tokens: int) -> None:
        """The KV of the first `num_ready_tokens` of an offered prompt is final. Nothing happens when the offer has ended."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.num_ready_tokens = num_ready_tokens
            lease.tell_followers()

    def complete(self, ticket: KVTicket) -> asyncio.Future[LeaseEnd]:
        """The KV is there: starts the lease of `ticket`, the complete form of the one offered. The future tells how it ends.

        Raises:
            TicketStale: the offer has been withdrawn.
        """
        lease = self._leases.get(ticket.key)
        if lease is None or lease.ticket.nonce != ticket.nonce:
            raise TicketStale(f"the offer of {ticket.key} has ended")
        now = self._clock.time()
        lease.ticket = ticket
        lease.is_readable = True
        lease.tell_followers()
        lease.last_deadline_s = now + self._config.max_lease_s
        self._set_deadline(lease, now + self._config.lease_s)
        return lease.end

    def withdraw(self, key: str) -> None:
        """Ends an offer or a lease that nobody will take. Idempotent."""
        lease = self._leases.get(key)
        if lease is not None:
            self._finish(lease, LeaseEnd.WITHDRAWN)

    async def follow(self, key: str, nonce: bytes) -> AsyncGenerator[Progress, None]:
        """How far an offered prompt is computed: at once, at each mark, and in the end with the complete ticket.

        Raises:
            TicketStale: the offer or the lease is over.
        """
        num_told = -1
        while (lease := self._living(key, nonce)) is not None:
            changed = lease.changed
            if lease.is_readable:
                yield Progress(lease.ticket.num_tokens, lease.ticket)
                return
            if lease.num_ready_tokens > num_told:
                num_told = lease.num_ready_tokens
                yield Progress(num_told)
            await changed.wait()  # at once, when it changed while the reader had the last item
        raise TicketStale(f"the offer of {key} is over")

    def check(self, ticket: KVTicket, num_blocks: int) -> None:
        """Whether the first `num_blocks` blocks of `ticket` may be read now; the offer is as good as the complete ticket.

        Raises:
            TicketStale: the lease is over.
            TicketMismatch: the ticket is not what was offered, or not all of these blocks are computed yet; names the field.
        """
        lease = self._living(ticket.key, ticket.nonce)
        if lease is None:
            raise TicketStale(f"the lease of {ticket.key} is over")
        if not lease.is_readable and num_blocks > lease.num_ready_tokens // lease.ticket.layout.block_size:
            raise TicketMismatch(f"of the prompt only {lease.num_ready_tokens} tokens are computed yet", param="first_token")
        ticket.check_is(lease.ticket.as_offered() if ticket.first_token is None else lease.ticket)

    def renew(self, key: str, nonce: bytes) -> float | None:
        """Extends the lease to its full length from now, within the cap; the seconds left, or None when it is over."""
        lease = self._living(key, nonce)
        if lease is None:
            return None
        if not lease.is_readable:
            return self._config.lease_s
        now = self._clock.time()
        self._set_deadline(lease, min(now + self._config.lease_s, lease.last_deadline_s))
        return lease.deadline_s - now

    def release(self, key: str, nonce: bytes, digest: bytes, taker: str) -> bool:
        """The commit. True (valid) ends the lease; the same taker may ask again and gets the same answer.

        Raises:
            TicketMismatch: `digest` is not the ticket's: a one-sided reader may have read other blocks.
        """
        if (key, nonce) in self._takers:
            return self._takers[key, nonce] == taker
        lease = self._living(key, nonce)
        if lease is None or not lease.is_readable:
            return False
        if not hmac.compare_digest(lease.ticket.digest(), digest):
            raise TicketMismatch(f"the ticket that was read for {key} is not what was offered", param="ticket")
        self._takers[key, nonce] = taker
        if len(self._takers) > _NUM_REMEMBERED:
            self._takers.popitem(last=False)
        self._finish(lease, LeaseEnd.TAKEN)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless every lease can still end: by its key, by its time, and to whoever waits for it."""
        for key, lease in self._leases.items():
            assert lease.ticket.key == key, f"the lease of {lease.ticket.key} is kept as {key}"
            assert (lease.timer is not None) == lease.is_readable, f"{key} is readable without a deadline, or has one too early"
            assert lease.deadline_s <= lease.last_deadline_s, f"the lease of {key} outlives its longest life"
            assert not lease.end.done() or lease.end.cancelled(), f"the lease of {key} has ended and is kept"
        assert len(self._takers) <= _NUM_REMEMBERED, "too many takers are remembered"

    def _living(self, key: str, nonce: bytes) -> _Lease | None:
        """The lease that `nonce` opens, unless it is over. A deadline counts from its instant, even when its timer is late."""
        lease = self._leases.get(key)
        if lease is None or not hmac.compare_digest(lease.ticket.nonce, nonce):
            return None
        if lease.is_readable and self._clock.time() >= lease.deadline_s:
            self._finish(lease, LeaseEnd.EXPIRED)
            return None
        return lease

    def _set_deadline(self, lease: _Lease, deadline_s: float) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
        lease.deadline_s = deadline_s
        lease.timer = self._clock.call_at(deadline_s, self._expire, lease.ticket.key, lease.ticket.nonce)

    def _expire(self, key: str, nonce: bytes) -> None:
        lease = self._leases.get(key)
        if lease is not None and lease.ticket.nonce == nonce:
            self._finish(lease, LeaseEnd.EXPIRED)

    def _finish(self, lease: _Lease, end: LeaseEnd) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
        del self._leases[lease.ticket.key]
        lease.tell_followers()
        if not lease.end.done():  # a cancelled waiter leaves a cancelled future behind
            lease.end.set_result(end)
        self._free(lease.ticket.key)
        self._on_end(end)
