"""Reads over one wire, in turns with a bare copy and a bare NIXL READ of as many bytes.

Runs in a process of its own, since UCX reads its environment once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack

import torch

from benchmarks.handoff.owner import OwnerProcess, owner_process
from benchmarks.handoff.read_figures import Reads, Sample
from benchmarks.handoff.wire import HOST, SECRET, Case
from cluster import wire
from cluster.errors import BatonError
from cluster.kv_transfer import nixl_library
from cluster.kv_transfer.nixl_reader import NixlPool, NixlReader
from cluster.kv_transfer.peers import Peer, Peers
from cluster.kv_transfer.selection import PlaneContext, select_planes


class Unavailable(Exception):
    """The wire cannot be used here; the message says why."""


def measure(case: Case) -> list[Reads]:
    """One for each size, in a reader and an owner that are started for it.

    Raises:
        Unavailable: this machine has not what the wire needs.
    """
    if case.wire.plane == "nixl" and not nixl_library.is_installed():
        raise Unavailable("the package nixl is not installed")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=case.wire.prepare_process) as process:
        return process.submit(_measure_here, case).result()


def _measure_here(case: Case) -> list[Reads]:
    torch.set_num_threads(1)
    try:
        with owner_process(case) as owner:
            return asyncio.run(_measure(case, owner))
    except BatonError as error:
        raise Unavailable(error.message) from None  # which crosses to the process that asked, and the cause would not


async def _measure(case: Case, owner: OwnerProcess) -> list[Reads]:
    async with AsyncExitStack() as stack:
        pool = torch.zeros(case.num_blocks, case.layout.block_bytes, dtype=torch.uint8).fill_(2)
        planes = select_planes([case.wire.plane], PlaneContext(pool, "the reader", HOST, SECRET))
        for plane in planes:
            stack.push_async_callback(plane.close)
        peers = Peers(planes, layout=case.layout, checkpoint="", secret=SECRET)
        stack.push_async_callback(peers.close)
        peer = await peers.get(owner.ticket)
        bare = stack.enter_context(ExitStack())
        turn = _Turn(case, owner, pool, peer, _bare_read(bare, peer, pool))
        return [await turn.reads(num_bytes) for num_bytes in case.read_bytes]


def _bare_read(stack: ExitStack, peer: Peer, pool: torch.Tensor) -> BareRead | None:
    description = peer.description.planes.get("nixl")
    if description is None:
        return None
    bare = BareRead(description, pool)
    stack.callback(bare.close)
    return bare


class _Turn:
    """A read, a copy and a bare READ, one after the other, as often as asked for."""

    def __init__(self, case: Case, owner: OwnerProcess, pool: torch.Tensor, peer: Peer, bare: BareRead | None) -> None:
        self._case, self._owner, self._pool, self._peer, self._bare = case, owner, pool, peer, bare
        self._block_ids = case.scattered(seed=1)
        self._copied = torch.zeros(len(self._block_ids) * pool.shape[1], dtype=torch.uint8).fill_(3)

    async def reads(self, num_bytes: int) -> Reads:
        num_blocks = self._case.num_read(num_bytes)
        samples = [await self._sample(num_blocks) for _ in range(self._case.repeats + 1)]
        block_bytes = self._pool.shape[1]
        return Reads(self._case.wire.name, self._case.block_size, block_bytes, num_blocks, tuple(samples[1:]))  # the first maps pages

    async def _sample(self, num_blocks: int) -> Sample:
        block_ids = self._block_ids[:num_blocks]
        cpu_s, owner_cpu_s, started_s = time.process_time(), self._owner.cpu_s(), time.perf_counter()
        await self._peer.read(self._owner.ticket, range(num_blocks), self._pool, block_ids)
        read_s = time.perf_counter() - started_s
        cpu_s, owner_cpu_s = time.process_time() - cpu_s, self._owner.cpu_s() - owner_cpu_s
        num_bytes = num_blocks * self._pool.shape[1]
        copy_s = _timed(lambda: self._copied[:num_bytes].copy_(self._pool.view(-1)[:num_bytes]))
        bare, rows = self._bare, [block.block_id for block in self._owner.ticket.blocks[:num_blocks]]
        bare_s = None if bare is None else _timed(lambda: bare.read(rows, block_ids))
        return Sample(read_s, copy_s, bare_s, cpu_s, owner_cpu_s)


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


class BareRead:
    """NIXL without a plane: one READ of everything, on an agent of its own, asked for without a pause."""

    def __init__(self, description: bytes, pool: torch.Tensor) -> None:
        """`description` is what the peer's plane published, `pool` what is read into.

        Raises:
            PlaneUnavailable: NIXL cannot be loaded, or cannot reach the peer.
        """
        self._reader = NixlReader(HOST, pool, wire.decode(NixlPool, description))
        self._pool = pool

    def read(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        """Blocks of the peer into rows of the pool."""
        number = self._reader.post_blocks(rows, self._pool, block_ids)
        while not self._reader.is_done(number):
            pass

    def close(self) -> None:
        """Ends the agent. Idempotent."""
        self._reader.close()
