"""The reading end of NIXL: an agent for one peer, which reads from that peer's pool into ours.

Every method belongs to one thread: agents are not thread-safe, and a post over shared memory takes as long as the copy does. The agent
has no progress thread. So on the way of every transport but RDMA, bytes arrive only inside of a call from here, and once there are no more
calls, nothing writes to a destination any more. Over RDMA, where bytes need no call, this would not do; we have not had any.

Nothing less will do (measured with UCX over TCP). Bytes of a READ whose handle was released arrive with a later call. So do those of a READ
that NIXL calls failed, a whole block after the error: NIXL asks the flush that it puts behind the blocks, not the blocks. An agent with
such a READ cannot end either: UCX aborts our process ("ucs_arbiter_group_is_empty(group)' failed"), or, if the peer stands still, the
peer's when it goes on ("Fatal: unexpected error: Endpoint timeout"). Such an agent is left as it is (`abandon`).

Hence an agent for each peer: what happens to one costs no other peer's reads. An abandoned one keeps its memory and its open files.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from cluster.errors import PlaneUnavailable, TransferError
from cluster.kv_transfer.nixl_library import BACKEND, make_agent

T = TypeVar("T")


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
class _Destination:
    tensor: torch.Tensor  # kept: its address must not become another tensor's
    registration: Any
    rows: Any  # prepared list


class NixlReader:
    """See the module."""

    def __init__(self, host: str, pool: torch.Tensor, source: NixlPool) -> None:
        """Registers `pool`. Other destinations are registered with their first read and kept until the end: give it few, and long-lived
        ones.

        Args:
            host: see `nixl_library.make_agent`.
            pool: ours, uint8 `[num_blocks, block_bytes]`.
            source: the peer's.

        Raises:
            PlaneUnavailable: NIXL cannot be loaded, UCX does not start here or cannot register the pool, or `source` describes no agent
                that can be reached, or one of another name.
        """
        self.source = source
        self.arrived_token = torch.zeros(1, len(source.token), dtype=torch.uint8)
        self._agent: Any = make_agent(f"reader-{secrets.token_hex(8)}", host, progress=False)
        self._destinations: dict[tuple[int, int, int], _Destination] = {}
        self._transfers: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._sources: tuple[Any, ...] = ()  # prepared lists, of the blocks and of the token
        try:
            self._destination(pool)
            name = self._call(lambda agent: agent.add_remote_agent(source.metadata).decode())
            if name != source.agent:
                raise self._failure(f"the peer's agent is {name}, not {source.agent}")
            blocks = self._prepare(name, source.address, source.num_blocks, source.block_bytes)
            self._sources = blocks, self._prepare(name, source.token_address, 1, len(source.token))
        except TransferError as error:
            raise PlaneUnavailable(str(error)) from error

    @property
    def closed(self) -> bool:
        """Whether all that was posted has ended for good. May be read in any thread."""
        return self._agent is None

    def post_blocks(self, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> int:
        """Starts a READ of the source's `rows` into rows `block_ids` of `destination`, uint8 `[any, block_bytes]`; its number.

        Raises:
            TransferError: the peer is gone, which closes the reader, or it was closed.
        """
        return self._post(0, rows, destination, block_ids)

    def post_token(self) -> int:
        """Starts a READ of the source's token into `arrived_token`; its number. Raises as `post_blocks`."""
        return self._post(1, [0], self.arrived_token, [0])

    def is_done(self, number: int) -> bool:
        """Makes progress with all transfers; whether this one is done, and is not asked for again then.

        Raises:
            TransferError: it failed, which closes the reader, or the reader was closed.
        """
        if self._check(self._call(lambda agent: agent.check_xfer_state(self._transfers[number]))) != "DONE":
            return False
        self._transfers.pop(number).release()
        return True

    def abandon(self) -> None:
        """Makes no more calls, because a READ came to no good end, and leaves the agent as it is until the process ends; see the module."""
        rows = [destination.rows for destination in self._destinations.values()]
        kept = self._agent, self._transfers, self._sources, rows  # whatever ends the agent when it is dropped
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._agent, self._transfers, self._sources, self._destinations = None, {}, (), {}

    def close(self) -> None:
        """Ends the agent, or abandons it if there is a READ that came to no good end. Idempotent."""
        if self.closed:
            return
        if self._transfers:
            self.abandon()
            return
        agent, self._agent, self._sources = self._agent, None, ()
        _try(partial(agent.remove_remote_agent, self.source.agent))
        for destination in self._destinations.values():
            _try(partial(agent.deregister_memory, destination.registration, backends=[BACKEND]))
        self._destinations.clear()

    def _post(self, source: int, rows: Sequence[int], destination: torch.Tensor, block_ids: Sequence[int]) -> int:
        local = self._destination(destination).rows
        into, out_of = _indices(block_ids), _indices(rows)
        transfer = self._call(lambda agent: agent.make_prepped_xfer("READ", local, into, self._sources[source], out_of))
        number = next(self._numbers)
        self._transfers[number] = transfer
        self._check(self._call(lambda agent: agent.transfer(transfer)))
        return number

    def _destination(self, tensor: torch.Tensor) -> _Destination:
        key = tensor.data_ptr(), tensor.shape[0], tensor.shape[1]
        if key not in self._destinations:
            assert tensor.dtype == torch.uint8 and tensor.is_contiguous()
            registration = self._call(lambda agent: agent.register_memory(tensor, backends=[BACKEND]))
            self._destinations[key] = _Destination(tensor, registration, self._prepare("", *key))
        return self._destinations[key]

    def _prepare(self, agent_name: str, address: int, num_rows: int, row_bytes: int) -> Any:
        rows = np.zeros((num_rows, 3), dtype=np.uint64)  # address, length, device
        rows[:, 0] = address + np.arange(num_rows, dtype=np.uint64) * np.uint64(row_bytes)
        rows[:, 1] = row_bytes
        return self._call(lambda agent: agent.prep_xfer_dlist(agent_name, rows, "DRAM", backends=[BACKEND]))

    def _call(self, call: Callable[[Any], T]) -> T:
        """Raises:
        TransferError: NIXL's error in words. The error itself would keep the agent alive, by the frames of its traceback.
        """
        if self.closed:
            raise TransferError("the NIXL agent is closed")
        try:
            return call(self._agent)
        except Exception as error:  # one class for each status, without a common base
            reason = str(error)
        raise self._failure(reason)

    def _check(self, state: str) -> str:
        if state == "ERR":
            raise self._failure("the transfer failed")
        return state

    def _failure(self, reason: str) -> TransferError:
        """Closes the reader: rows of what has failed may still be written to; see the module."""
        self.close()
        return TransferError(f"NIXL: {reason}")


def _try(call: Callable[[], object]) -> None:
    """An agent may have noticed by itself that the peer is gone."""
    with suppress(Exception):
        call()


def _indices(rows: Sequence[int]) -> Any:
    return np.array(rows, dtype=np.int32)
