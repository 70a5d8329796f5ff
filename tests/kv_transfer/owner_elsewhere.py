"""An `Owner` in another process, with the face of one in ours."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import torch

from cluster.kv_layout import KVLayout
from cluster.kv_ticket import KVTicket
from tests.kv_transfer.owner import SECRET, SMALL, Owner, random_pool
from tests.kv_transfer.planes import PlaneMaker
from tests.kv_transfer.process_state import Held
from tests.other_process import OtherProcess

_numbers = itertools.count()
_owners: Final[dict[int, Owner]] = {}  # over there


class OwnerElsewhere:
    """One life of such a worker in the process `there`, which may have more of them."""

    def __init__(
        self,
        there: OtherProcess,
        plane: str,
        *,
        layout: KVLayout = SMALL,
        num_blocks: int = 64,
        device: str = "cpu",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`device` is torch's, of the pool; `environment` is for the process, beside what it has."""
        self._there = there
        self._number = next(_numbers)
        self._shape = num_blocks, layout.block_bytes
        there.call(_set, dict(environment or {}))
        self.incarnation = there.call(_make, self._number, plane, layout, num_blocks, device)
        self.endpoint = ""

    async def start(self, port: int = 0) -> None:
        self.endpoint = await self._there.acall(_start, self._number, port)

    @cached_property
    def pool(self) -> torch.Tensor:
        """What is in its pool."""
        pool = torch.empty(self._shape, dtype=torch.uint8)
        random_pool(pool, seed=1)
        return pool

    def lease(self, block_ids: Sequence[int], *, num_tokens: int | None = None) -> KVTicket:
        """See `Owner.lease`."""
        return self._there.call(_lease, self._number, list(block_ids), num_tokens)

    def end_leases(self) -> None:
        self._there.call(_end_leases, self._number)

    def zero(self, block_id: int, start: int) -> None:
        """See `Owner.zero`."""
        self._there.call(_zero, self._number, block_id, start)
        self.pool[block_id, start:] = 0

    def held(self) -> Held:
        """See `Owner.held`."""
        return self._there.call(Held.now)

    async def close(self) -> None:
        await self._there.acall(_close, self._number)


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _make(number: int, plane: str, layout: KVLayout, num_blocks: int, device: str) -> str:
    torch.set_num_threads(1)
    _owners[number] = Owner(plane, layout=layout, num_blocks=num_blocks, maker=PlaneMaker(SECRET), device=device)
    return _owners[number].incarnation


async def _start(number: int, port: int) -> str:
    await _owners[number].start(port)
    return _owners[number].endpoint


def _lease(number: int, block_ids: Sequence[int], num_tokens: int | None) -> KVTicket:
    return _owners[number].lease(block_ids, num_tokens=num_tokens)


def _end_leases(number: int) -> None:
    _owners[number].end_leases()


def _zero(number: int, block_id: int, start: int) -> None:
    _owners[number].zero(block_id, start)


async def _close(number: int) -> None:
    if number in _owners:
        await _owners.pop(number).close()
