"""The plane of NIXL with its UCX backend: RDMA where the machines have it, shared memory or TCP elsewhere. One-sided.

    1. `publish` registers the pool with an agent that is named after the worker's incarnation; a thread of UCX answers peers
    2. `connect` makes that agent known to one of ours and reads the owner's token: who cannot is told here, not at the first handoff
    3. a read is a few READs of prepared lists, then one more of the token: whatever answers at that address is still the owner's pool
    4. what has been posted is waited for, however the read ends; one that fails or does not end costs us the agent (`NixlReader`). The next
       `connect` makes another
    5. every call into NIXL is made in a daemon thread, which nothing joins: UCX may not come back from ending an agent

UCX asks for no secret: with a host that is not loopback, whoever reaches its ports may reach this process's memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch

from cluster import wire
from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_ticket import KVTicket
from cluster.kv_transfer.base import Connection, DataPlane, PeerDescription, check_block_bytes, described_pool, source_rows
from cluster.kv_transfer.daemon_thread import DaemonThread
from cluster.kv_transfer.nixl_library import BACKEND, make_agent
from cluster.kv_transfer.nixl_reader import NixlPool, NixlReader
from cluster.kv_transfer.outlast import outlast
from cluster.kv_transfer.slices import in_slices

_log = logging.getLogger(__name__)

_SLICE_BYTES: Final = 8 * 2**20  # of one READ: what a cancel waits for
_MAX_IN_FLIGHT: Final = 2  # READs of one peer, in the order they were asked for: the second fills the gap after the first
_TOKEN_BYTES: Final = 16
_STALL_S: Final = 5.0  # a READ that takes longer will not end
_HURRY_S: Final = 1.0  # the same, once nobody wants it any more
_CLOSE_S: Final = 10.0  # for all agents to end
_POLL_S: Final = (0.0001, 0.002)  # first and longest pause: UCX reads its sockets only when it is asked, and these fill up

_T = TypeVar("_T")


class _Run(Protocol):
    """Runs work in the thread that the agents belong to."""

    async def __call__(self, work: Callable[[], _T]) -> _T: ...


class NixlPlane(DataPlane):
    """Reads and is read by NIXL."""

    name = "nixl"

    def __init__(self, pool: torch.Tensor, incarnation: str, host: str) -> None:
        """
        Args:
            pool: ours, uint8 `[num_blocks, block_bytes]`.
            incarnation: of this worker.
            host: that it binds to; see `nixl_library.make_agent`.
        """
        self._pool = pool
        self._incarnation = incarnation
        self._host = host
        self._owner: _OwnerAgent | None = None
        self._readers: set[NixlReader] = set()  # closed with us
        self._thread = DaemonThread("kv-nixl")

    async def publish(self) -> bytes:
        self._owner = await self._run(lambda: _OwnerAgent(_agent_name(self._incarnation), self._host, self._pool))
        return wire.encode(self._owner.description)

    async def connect(self, peer: PeerDescription) -> Connection:
        pool = described_pool(NixlPool, self.name, peer)
        check_block_bytes(pool.block_bytes, peer)
        if pool.agent != _agent_name(peer.incarnation):
            raise PlaneUnavailable(f"the NIXL agent {pool.agent} is not that of incarnation {peer.incarnation}")
        link = _Link(await self._run(lambda: self._open(pool)), self._run)
        try:
            await link.check()
        except TransferError as error:
            await link.close()
            raise PlaneUnavailable(f"the peer's memory cannot be read: {error}") from error
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        if self._thread.stopped:
            return
        closing = self._thread.submit(self._close)
        self._thread.stop()
        try:
            await asyncio.wait_for(asyncio.shield(closing), _CLOSE_S)
        except TimeoutError:
            _log.error("NIXL's agents have not ended within %g s: they are left to the end of the process", _CLOSE_S)

    def _open(self, pool: NixlPool) -> NixlReader:
        self._readers = {reader for reader in self._readers if not reader.closed}
        reader = NixlReader(self._host, self._pool, pool)
        self._readers.add(reader)
        return reader

    def _close(self) -> None:
        if self._owner is not None:
            self._owner.close()
            self._owner = None
        for reader in self._readers:
            reader.close()
        self._readers.clear()

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await self._thread.submit(work)


class _OwnerAgent:
    """The agent that makes a pool readable."""

    def __init__(self, name: str, host: str, pool: torch.Tensor) -> None:
        """Raises:
        PlaneUnavailable: NIXL cannot be loaded, UCX does not start here, or cannot register the pool.
        """
        self._agent: Any = make_agent(name, host, progress=True)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._token = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        try:
            self._registrations = [self._agent.register_memory(tensor, backends=[BACKEND]) for tensor in (pool, self._token)]
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # one class for each status, without a common base
            raise PlaneUnavailable(f"the pool cannot be registered: {error}") from error
        num_blocks, block_bytes = pool.shape
        self.description = NixlPool(name, metadata, pool.data_ptr(), num_blocks, block_bytes, token, self._token.data_ptr())

    def close(self) -> None:
        """From now on reads fail. Idempotent."""
        if self._agent is None:
            return
        self._token.zero_()
        for registration in self._registrations:
            self._agent.deregister_memory(registration, backends=[BACKEND])
        self._agent = None


class _Link(Connection):
    """A peer's pool, for as long as it answers."""

    def __init__(self, reader: NixlReader, run: _Run) -> None:
        self._reader = reader
        self._run = run
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._transfers: dict[asyncio.Task[None], _Transfer] = {}
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closing is not None or self._reader.closed

    async def read(self, ticket: KVTicket, indexes: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        assert len(indexes) == len(block_ids) and destination.shape[1] == self._reader.source.block_bytes
        self._check_open()
        rows = source_rows(ticket, indexes, self._reader.source.num_blocks)
        if not rows:
            return
        try:
            await self._read_slices(rows, destination, block_ids)
            await self.check()
        except TransferError:
            self._start_closing()
            raise

    async def _read_slices(self, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> None:
        async def read_slice(part: slice) -> None:
            await self._transfer(partial(self._reader.post_blocks, rows[part], destination, block_ids[part]))

        await in_slices(len(rows), max(1, _SLICE_BYTES // destination.shape[1]), read_slice)

    async def check(self) -> None:
        """Raises:
        TransferError: the peer does not answer, or its pool is not there any more.
        """
        await self._transfer(self._reader.post_token)
        if self._reader.arrived_token.numpy().tobytes() != self._reader.source.token:
            raise TransferError("the peer's pool is gone")

    async def close(self) -> None:
        await asyncio.shield(self._start_closing())

    async def _transfer(self, post: Callable[[], int]) -> None:
        """Starts a READ and outlasts it, whatever happens to us meanwhile."""
        async with self._slots:
            self._check_open()
            transfer = _Transfer(self._reader, self._run)
            task = asyncio.create_task(transfer.run(post))
            self._transfers[task] = transfer
            task.add_done_callback(self._transfers.pop)
            await outlast(task, transfer.hurry)

    def _check_open(self) -> None:
        if self.closed:
            raise TransferError("the connection to the peer is closed")

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        for transfer in self._transfers.values():
            transfer.hurry()
        while self._transfers:
            await asyncio.wait(list(self._transfers))
        if not self._reader.closed:
            await self._run(self._reader.close)


class _Transfer:
    """One READ on its way."""

    def __init__(self, reader: NixlReader, run: _Run) -> None:
        self._reader = reader
        self._run = run
        self._patience_s = _STALL_S

    def hurry(self) -> None:
        """Nobody wants it any more."""
        self._patience_s = _HURRY_S

    async def run(self, post: Callable[[], int]) -> None:
        """Returns when it is done.

        Raises:
            TransferError: it failed, or did not end and was abandoned. The reader is closed then.
        """
        number, is_done = await self._run(partial(self._start, post))
        started, (pause_s, longest_pause_s) = time.monotonic(), _POLL_S
        while not is_done:
            if time.monotonic() - started > self._patience_s:
                await self._run(self._reader.abandon)
                raise TransferError(f"the peer sent nothing for {self._patience_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)
            if self._reader.closed:
                raise TransferError("the NIXL agent was closed during the read")
            is_done = await self._run(partial(self._reader.is_done, number))

    def _start(self, post: Callable[[], int]) -> tuple[int, bool]:
        number = post()
        return number, self._reader.is_done(number)


def _agent_name(incarnation: str) -> str:
    return f"owner-{incarnation}"
