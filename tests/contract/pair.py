"""An owner of KV and a reader of it, over one plane and a real KV service: in one process, or in two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import pytest
import torch

from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.peers import Peers
from tests.eventually import eventually
from tests.kv_transfer.owner import CHECKPOINT, SECRET, Owner
from tests.kv_transfer.owner_elsewhere import OwnerElsewhere
from tests.kv_transfer.planes import NAMES, NEEDS_NIXL, PlaneMaker
from tests.other_process import OtherProcess

# Every plane in one process, and those that cross from one to another in two.
PAIRS: Final = tuple(
    pytest.param((name, is_elsewhere), id=f"{name}-{2 if is_elsewhere else 1}", marks=NEEDS_NIXL if name == "nixl" else ())
    for name in NAMES
    for is_elsewhere in (False, True)
    if not (is_elsewhere and name == "in_process")
)


class Pair:
    """An owner and a reader."""

    def __init__(self, name: str, there: OtherProcess | None, layout: KVLayout, num_blocks: int) -> None:
        """The owner lives in the process `there`; None: in ours."""
        self.name = name
        self.maker = PlaneMaker(SECRET)
        self._there = there
        self._layout = layout
        self.owner = self._make_owner(num_blocks)
        self.pool = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        self.plane = self.maker.make(name, self.pool, "the reader")
        self.peers = Peers([self.plane], layout=layout, checkpoint=CHECKPOINT, secret=SECRET)

    @classmethod
    def of(cls, request: pytest.FixtureRequest, layout: KVLayout, num_blocks: int) -> Pair:
        """As one of `PAIRS` says."""
        name, is_elsewhere = request.param
        return cls(name, request.getfixturevalue("there") if is_elsewhere else None, layout, num_blocks)

    async def __aenter__(self) -> Pair:
        await self.owner.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.peers.close()
        await self.plane.close()
        await self.owner.close()

    async def restart(self) -> None:
        """Another life of the owner, at the address of the one before."""
        await self.owner.close()
        port = int(self.owner.endpoint.rpartition(":")[2])
        self.owner = self._make_owner(len(self.pool))
        await self.owner.start(port)

    def _make_owner(self, num_blocks: int) -> Owner | OwnerElsewhere:
        if self._there is None:
            return Owner(self.name, layout=self._layout, num_blocks=num_blocks, maker=self.maker)
        return OwnerElsewhere(self._there, self.name, layout=self._layout, num_blocks=num_blocks)

    async def read(self, ticket: KVTicket, indexes: Sequence[int], block_ids: Sequence[int]) -> None:
        peer = await self.peers.get(ticket)
        await peer.read(ticket, indexes, self.pool, block_ids)

    async def read_until_first_block(self, ticket: KVTicket) -> asyncio.Task[None]:
        """A read of the whole ticket that has copied at least one block and is likely not done."""
        everything = range(len(ticket.blocks))
        task = asyncio.create_task(self.read(ticket, everything, everything))
        await eventually(lambda: task.done() or bool(self.pool[0, 0]), interval_s=0)
        return task
