"""What every data plane must do where the reader's blocks are others than the owner's."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
import torch

from cluster.errors import TicketMismatch
from cluster.kv_transfer.peers import Peers
from tests.contract.pair import PAIRS, Pair
from tests.kv_transfer.owner import CHECKPOINT, SECRET, SMALL


@pytest.fixture(params=PAIRS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with Pair.of(request, SMALL, 600) as pair:
        yield pair


async def test_ticket_of_another_layout_than_its_workers(pair: Pair) -> None:
    """One that could be repacked, so that only the worker's own description tells."""
    ticket = dataclasses.replace(pair.owner.lease([1]), layout=dataclasses.replace(SMALL, block_size=16))
    with pytest.raises(TicketMismatch) as caught:
        await pair.peers.get(ticket)
    assert caught.value.param == "layout"


@pytest.mark.parametrize("block_size", [4, 64])
async def test_blocks_of_another_size_are_read_into_a_staging_area(pair: Pair, block_size: int) -> None:
    """As they are; repacking is not the plane's affair."""
    ours = dataclasses.replace(SMALL, block_size=block_size)
    plane = pair.maker.make(pair.name, torch.zeros(8, ours.block_bytes, dtype=torch.uint8), "another reader")
    peers = Peers([plane], layout=ours, checkpoint=CHECKPOINT, secret=SECRET)
    ticket = pair.owner.lease(range(599, 299, -1))
    staging = torch.zeros(400, SMALL.block_bytes, dtype=torch.uint8)
    await (await peers.get(ticket)).read(ticket, range(300), staging, range(100, 400))
    assert torch.equal(staging[100:], pair.owner.pool[range(599, 299, -1)]) and not staging[:100].any()
    await peers.close()
    await plane.close()
