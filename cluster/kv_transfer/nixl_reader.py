"""The reading end of NIXL: one agent, the destinations it registered and the pools of peers it reads from.

Every method belongs to one thread: agents are not thread-safe, and a post over shared memory takes as long as the copy does. The agent
has no progress thread. So on the way of every transport but RDMA, bytes arrive only inside of a call from here.

Releasing the handle of a transfer in flight does not end the transfer: its bytes arrive with a later call (measured with UCX over TCP).
So `close` makes no more calls. The lists of peers (`Source`) keep the agent itself until their links are dropped: where it ended at once,
with a READ of a stopped peer on its way over TCP, UCX ended that peer's process when it went on ("Fatal: unexpected error: Endpoint
timeout"). Over RDMA, where bytes need no call to arrive, this would not do; we have not had any.

A READ that has failed is over as a whole, though NIXL says so at its first block: UCX fails an endpoint with all that was asked of it, and
drops what still arrives for it. Tests kill a peer in the middle of a READ and look at the rows while other bytes come.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_transfer.nixl_library import BACKEND, make_agent


@dataclass(frozen=True, slots=True)
class NixlPool:
    """What a reader needs to reach an owner's pool."""

    agent: str  # its name
    metadata: bytes
    address: int  # of block 0, in the owner's address space
    num_blocks: int
    block_bytes: int
    token: bytes  # lies in the owner's memory for as long as the pool may be read
    token_address: int


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A peer's pool, ready to be read."""

    pool: NixlPool
    blocks: Any  # prepared list of all its blocks
    token: Any  # and of its token
    arrived_token: torch.Tensor  # ours, uint8 `[1, token bytes]`


@dataclass(frozen=True, slots=True, eq=False)
class _Destination:
    tensor: torch.Tensor  # kept: its address must not become another tensor's
    registration: Any
    rows: Any  # prepared list


class NixlReader:
    """See the module."""

    def __init__(self, host: str, pool: torch.Tensor) -> None:
        """Registers the pool. Other destinations are registered with their first read and kept until `close`: give it few, and long-lived
        ones.

        Args:
            host: see `nixl_library.make_agent`.
            pool: uint8 `[num_blocks, block_bytes]`.

        Raises:
            PlaneUnavailable: NIXL cannot be loaded, UCX does not start here, or it cannot register the pool.
        """
        self._agent: Any = make_agent(f"reader-{secrets.token_hex(8)}", host, progress=False)
        self._destinations: dict[tuple[int, int, int], _Destination] = {}
        self._sources: set[Source] = set()
        self._given_up: set[Source] = set()
        self._transfers: dict[int, Any] = {}
        self._numbers = itertools.count()
        try:
            self._destination(pool)
        except TransferError as error:
            raise PlaneUnavailable(f"our pool cannot be registered: {error}") from error

    @property
    def closed(self) -> bool:
        """Whether all that was posted has ended for good. May be read in any thread."""
        return self._agent is None

    def open(self, pool: NixlPool) -> Source:
        """Raises:
        PlaneUnavailable: `pool` describes no agent that can be reached, or one of another name.
        """
        try:
            name = self._native(lambda agent: agent.add_remote_agent(pool.metadata).decode())
            if name != pool.agent:
                self._native(lambda agent: agent.remove_remote_agent(name))
                raise PlaneUnavailable(f"the peer's NIXL agent is {name}, not {pool.agent}")
            blocks = self._prepare(name, pool.address, pool.num_blocks, pool.block_bytes)
            token = self._prepare(name, pool.token_address, 1, len(pool.token))
        except TransferError as error:
            raise PlaneUnavailable(f"the peer's NIXL agent cannot be used: {error}") from error
        source = Source(pool, blocks, token, torch.zeros(1, len(pool.token), dtype=torch.uint8))
        self._sources.add(source)
        return source

    def post_blocks(self, source: Source, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> int:
        """Starts a READ of `source`'s `rows` into rows `block_ids` of `destination`, uint8 `[any, block_bytes]`; its number.

        Raises:
            TransferError: the peer is gone, or the agent is closed.
        """
        return self._post(source.blocks, rows, destination, block_ids)

    def post_token(self, source: Source) -> int:
        """Starts a READ of `source`'s token into `arrived_token`; its number. Raises as `post_blocks`."""
        return self._post(source.token, [0], source.arrived_token, [0])

    def is_done(self, number: int) -> bool:
        """Makes progress with all transfers; whether this one is done. One that has ended, well or not, is not asked for again.

        Raises:
            TransferError: it failed, or the agent was closed.
        """
        try:
            state = self._native(lambda agent: agent.check_xfer_state(self._transfers[number]))
            _check_state(state)
        except TransferError:
            self._release(number)
            raise
        if state == "DONE":
            self._release(number)
        return bool(state == "DONE")

    def give_up(self, source: Source) -> None:
        """Keeps what a transfer of `source`'s token needs until the agent ends: it does not come to an end itself."""
        self._sources.discard(source)
        self._given_up.add(source)

    def close_source(self, source: Source) -> None:
        """Forgets a peer whose transfers have ended. Idempotent, and without effect on one that was given up."""
        if source in self._sources:
            self._sources.remove(source)
            self._forget_destination(_key(source.arrived_token))
            source.blocks.release()
            source.token.release()
            with suppress(TransferError):  # it may have noticed by itself that the peer is gone
                self._native(lambda agent: agent.remove_remote_agent(source.pool.agent))

    def close(self) -> None:
        """No more calls, so nothing writes to a destination any more; see the module. Idempotent."""
        if self.closed:
            return
        for number in list(self._transfers):
            self._release(number)
        self._sources |= self._given_up
        self._given_up.clear()
        for source in list(self._sources):
            self.close_source(source)
        for key in list(self._destinations):
            self._forget_destination(key)
        self._agent = None

    def _post(self, remote: Any, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> int:
        local = self._destination(destination).rows
        indices = _indices(block_ids), _indices(rows)
        number = next(self._numbers)
        self._transfers[number] = self._native(lambda agent: agent.make_prepped_xfer("READ", local, indices[0], remote, indices[1]))
        try:
            _check_state(self._native(lambda agent: agent.transfer(self._transfers[number])))
        except TransferError:
            self._release(number)
            raise
        return number

    def _release(self, number: int) -> None:
        transfer = self._transfers.pop(number, None)
        if transfer is not None:
            with suppress(TransferError):
                self._native(lambda _: transfer.release())

    def _destination(self, tensor: torch.Tensor) -> _Destination:
        key = _key(tensor)
        if key not in self._destinations:
            assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
            registration = self._native(lambda agent: agent.register_memory(tensor, backends=[BACKEND]))
            self._destinations[key] = _Destination(tensor, registration, self._prepare("", *key))
        return self._destinations[key]

    def _forget_destination(self, key: tuple[int, int, int]) -> None:
        destination = self._destinations.pop(key, None)
        if destination is not None:
            destination.rows.release()
            self._native(lambda agent: agent.deregister_memory(destination.registration, backends=[BACKEND]))

    def _prepare(self, agent_name: str, address: int, num_rows: int, row_bytes: int) -> Any:
        rows = np.zeros((num_rows, 3), dtype=np.uint64)  # address, length, device
        rows[:, 0] = address + np.arange(num_rows, dtype=np.uint64) * np.uint64(row_bytes)
        rows[:, 1] = row_bytes
        return self._native(lambda agent: agent.prep_xfer_dlist(agent_name, rows, "DRAM", backends=[BACKEND]))

    def _native(self, call: Callable[[Any], Any]) -> Any:
        """Raises:
        TransferError: NIXL's error in words. The error itself would keep the agent alive, by the frames of its traceback.
        """
        if self.closed:
            raise TransferError("the NIXL agent is closed")
        try:
            return call(self._agent)
        except Exception as error:  # one class for each status, without a common base
            reason = str(error)
        raise TransferError(f"NIXL: {reason}")


def _check_state(state: str) -> None:
    if state == "ERR":
        raise TransferError("NIXL: the transfer failed")


def _key(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address, rows, bytes of a row."""
    return tensor.data_ptr(), tensor.shape[0], tensor.shape[1]


def _indices(rows: Sequence[int]) -> Any:
    return np.array(rows, dtype=np.int32)
