"""A process that owns a KV pool and lets it be read, as a prefill worker does, without an engine."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import torch

from benchmarks.handoff.wire import HOST, SECRET, Case
from cluster import rpc
from cluster.errors import PlaneUnavailable
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer.base import Progress
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.kv_transfer.selection import PlaneContext, publish, select_planes
from cluster.kv_transfer.service import KVService

_END_S: Final = 10.0


class OwnerProcess:
    """As the reader sees it."""

    def __init__(self, ticket: KVTicket, pid: int) -> None:
        self.ticket = ticket  # for the blocks of the largest read
        self._clock = _cpu_clock(pid)

    def cpu_s(self) -> float:
        """CPU time that the process has used, in all threads."""
        return time.clock_gettime(self._clock)


@contextmanager
def owner_process(case: Case) -> Iterator[OwnerProcess]:
    """Starts it. It ends with the context, or with this process.

    Raises:
        PlaneUnavailable: its pool cannot be read by any plane; the message is its own.
        EOFError: it ended; why, stderr says.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_live, args=(case, theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        ready = ours.recv()
        if isinstance(ready, str):
            raise PlaneUnavailable(ready)
        yield OwnerProcess(ready, process.pid)
    finally:
        ours.close()
        process.join(_END_S)
        process.kill()
        process.join()


class _OpenHouse:
    """Leases that never end."""

    def check(self, ticket: KVTicket, num_blocks: int) -> None: ...

    def follow(self, key: str, nonce: bytes) -> AsyncGenerator[Progress, None]:
        raise NotImplementedError("complete tickets are not followed")

    def renew(self, key: str, nonce: bytes) -> float | None:
        return 1e9

    def release(self, key: str, nonce: bytes, digest: bytes, taker: str) -> bool:
        return True


def _live(case: Case, reader: Connection) -> None:
    torch.set_num_threads(1)
    try:
        asyncio.run(_own(case, reader))
    except PlaneUnavailable as error:
        reader.send(error.message)


async def _own(case: Case, reader: Connection) -> None:
    """Until the reader closes its end."""
    layout, memory = case.layout, PoolMemory()
    pool = memory.allocate(case.num_blocks * layout.block_bytes).view(case.num_blocks, layout.block_bytes).fill_(1)
    incarnation = secrets.token_hex(8)
    names = dict.fromkeys([case.wire.plane, "nixl"])  # NIXL always, for the bare READ
    planes = select_planes(list(names), PlaneContext(pool, incarnation, HOST, SECRET, memory))
    server = rpc.server(SECRET)
    service = KVService(
        incarnation=incarnation, layout=layout, checkpoint="", domain="", pool=pool, planes=await publish(planes), checker=_OpenHouse()
    )
    service.register(server)
    endpoint = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    await server.start()
    blocks = tuple(BlockRef(block_id, 0) for block_id in case.scattered(seed=0))
    num_tokens = len(blocks) * layout.block_size
    reader.send(KVTicket("benchmark", 0, bytes(16), incarnation, endpoint, blocks, num_tokens, layout, "", "", 1e9))
    await asyncio.to_thread(reader.poll, None)
    await server.stop(None)
    for plane in planes:
        await plane.close()
    memory.close()


def _cpu_clock(pid: int) -> int:
    """The kernel's clock of the CPU time of another process."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ProcessLookupError(error, f"no CPU clock of process {pid}")
    return clock.value
