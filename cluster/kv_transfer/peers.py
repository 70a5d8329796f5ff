"""The prefill workers that a decode worker reads from, by incarnation: a restarted worker is another peer, even at the same address.

    unknown ── first ticket ──► connecting ──► known ── its connection is lost ──► unknown
                                    └── failed ──► unknown

What is known of a peer (description, plane, mapping, channels) is asked once and thrown away when the peer is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import torch

from cluster.errors import TicketMismatch
from cluster.faults.injector import NO_FAULTS, FaultInjector
from cluster.kv_layout import KVLayout, why_no_handover
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription, Progress
from cluster.kv_transfer.control import KVControlClient
from cluster.kv_transfer.selection import connect
from cluster.types import KVPeer


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of one prefill worker, reachable."""

    description: PeerDescription
    choice: KVPeer  # of the plane
    connection: Connection
    control: KVControlClient

    @property
    def plane(self) -> str:
        """By which its blocks come."""
        return self.choice.plane

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        """See `Connection.read`."""
        await self.connection.read(ticket, indexes, destination, block_ids)

    def follow(self, ticket: KVTicket) -> AsyncGenerator[Progress, None]:
        """See `KVControlClient.follow`."""
        return self.control.follow(ticket)

    async def renew(self, ticket: KVTicket) -> float | None:
        """See `KVControlClient.renew`."""
        return await self.control.renew(ticket)

    async def release(self, ticket: KVTicket, taker: str) -> bool:
        """See `KVControlClient.release`: the commit."""
        return await self.control.release(ticket, taker)

    async def close(self) -> None:
        await self.connection.close()
        await self.control.close()


class Peers:
    """Use it on one event loop."""

    def __init__(
        self, planes: Sequence[DataPlane], *, layout: KVLayout, checkpoint: str, secret: str, faults: FaultInjector = NO_FAULTS
    ) -> None:
        """
        Args:
            planes: ours, in order of preference; closed by their owner, not here.
            layout: of our blocks, which those of a peer must be able to become.
            checkpoint: of our model, likewise.
            secret: of the cluster.
            faults: at `commit`.
        """
        self._planes = planes
        self._layout = layout
        self._checkpoint = checkpoint
        self._secret = secret
        self._faults = faults
        self._peers: dict[str, asyncio.Task[Peer]] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Peers known or being connected to."""
        return len(self._peers)

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Of the same."""
        return tuple(self._peers)

    @property
    def choices(self) -> tuple[KVPeer, ...]:
        """Of the plane to each peer that is known."""
        return tuple(task.result().choice for task in self._peers.values() if _is_known(task))

    async def get(self, ticket: KVTicket) -> Peer:
        """The peer that issued `ticket`, whose KV fits our pool as it is or repacked.

        Raises:
            TicketMismatch: another model, layout or domain; names the field.
            WrongIncarnation: the peer has been replaced by another life.
            PlaneUnavailable: no data plane reaches it.
            TransferError: it does not answer.
        """
        self._check(ticket.layout, ticket.checkpoint)
        known = self._peers.get(ticket.incarnation)
        if known is not None and _is_known(known) and known.result().connection.closed:
            await self._forget(ticket.incarnation, known)
        connecting = self._peers.get(ticket.incarnation)
        if connecting is None:
            connecting = asyncio.create_task(self._connect(ticket))
            self._peers[ticket.incarnation] = connecting
            self._watch(ticket.incarnation, connecting)
        peer = await asyncio.shield(connecting)
        if ticket.layout != peer.description.layout:
            raise TicketMismatch("the peer's blocks have another layout than the ticket says", param="layout")
        if ticket.domain != peer.description.domain:
            raise TicketMismatch(f"the peer computes KV in the domain {peer.description.domain}, not {ticket.domain}", param="domain")
        return peer

    async def close(self) -> None:
        """Forgets all peers. Idempotent."""
        for incarnation, task in list(self._peers.items()):
            task.cancel()
            await self._forget(incarnation, task)
        await asyncio.gather(*self._watches)

    async def _connect(self, ticket: KVTicket) -> Peer:
        control = KVControlClient(ticket.endpoint, ticket.incarnation, self._secret, self._faults)
        try:
            description = await control.describe()
            self._check(description.layout, description.checkpoint)
            choice, connection = await connect(self._planes, description)
        except BaseException:
            await control.close()
            raise
        return Peer(description, choice, connection, control)

    def _check(self, layout: KVLayout, checkpoint: str) -> None:
        reason = why_no_handover(layout, self._layout)
        if reason is not None:
            raise TicketMismatch(f"the peer's blocks cannot become ours: {reason}", param="layout")
        if checkpoint != self._checkpoint:
            raise TicketMismatch("the peer serves another model than we do", param="checkpoint")

    def _watch(self, incarnation: str, connecting: asyncio.Task[Peer]) -> None:
        watch = asyncio.create_task(self._forget_when_lost(incarnation, connecting))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _forget_when_lost(self, incarnation: str, connecting: asyncio.Task[Peer]) -> None:
        await asyncio.wait([connecting])
        if _is_known(connecting):
            await connecting.result().control.wait_lost()
        await self._forget(incarnation, connecting)

    async def _forget(self, incarnation: str, task: asyncio.Task[Peer]) -> None:
        if self._peers.get(incarnation) is task:
            del self._peers[incarnation]
        await asyncio.wait([task])
        if _is_known(task):
            await task.result().close()


def _is_known(task: asyncio.Task[Peer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
