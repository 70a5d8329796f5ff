"""An owner of KV and a reader of it, over one plane and a real KV service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.peers import Peers
from tests.kv_transfer.owner import CHECKPOINT, SECRET, Owner
from tests.kv_transfer.planes import PlaneMaker
from tests.kv_transfer.process_state import eventually


class Pair:
    """An owner and a reader."""

    def __init__(self, name: str, layout: KVLayout, num_blocks: int, secret: str = SECRET) -> None:
        self.name = name
        self.maker = PlaneMaker(SECRET)
        self.owner = Owner(name, layout=layout, num_blocks=num_blocks, maker=self.maker)
        self.pool = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        self.plane = self.maker.make(name, self.pool, "the reader")
        self.peers = Peers([self.plane], layout=layout, checkpoint=CHECKPOINT, secret=secret)

    async def __aenter__(self) -> Pair:
        await self.owner.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.peers.close()
        await self.plane.close()
        await self.owner.close()

    async def read(self, ticket: KVTicket, indexes: Sequence[int], block_ids: Sequence[int]) -> None:
        peer = await self.peers.get(ticket)
        await peer.read(ticket, indexes, self.pool, block_ids)

    async def read_until_first_block(self, ticket: KVTicket) -> asyncio.Task[None]:
        """A read of the whole ticket that has copied at least one block and is likely not done."""
        everything = range(len(ticket.blocks))
        task = asyncio.create_task(self.read(ticket, everything, everything))
        await eventually(lambda: task.done() or bool(self.pool[0, 0]), interval_s=0)
        return task
