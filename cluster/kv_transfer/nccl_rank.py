"""One rank of a communicator on an event loop: what it is asked for happens in a thread of its own, in the order of asking.

    new ── join ──► joined ── post … ──► groups on their way ──► done
     └── abort ──────┴── abort ───────────────┴──► aborted: nothing of it reads or writes memory any more, for good

A communicator is never mended: what breaks it, or takes too long, aborts it, and the pair makes another one. cupy has no call that takes
back a join, so one whose other rank never comes keeps its thread until the other process ends; what comes of it then is aborted at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from cluster.errors import TransferError
from cluster.kv_transfer.daemon_thread import DaemonThread
from cluster.kv_transfer.nccl_device import Communicator, Device, Rows
from cluster.kv_transfer.patience import Patience

_log = logging.getLogger(__name__)

_JOIN_S: Final = 20.0
_POLL_S: Final = (0.0001, 0.002)  # first and longest pause between two looks at the device
_SETTLE_S: Final = 0.5  # for a call that is just being made to come back before its communicator is aborted under it
_SILENCE_S: Final = 10.0  # how often it is said that a device does not answer

_T = TypeVar("_T")


class Rank:
    """Make it on the event loop; `abort` it in the end."""

    def __init__(self, device: Device) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it is being aborted
        self.last_done_s = 0.0  # when a group was done last, by `time.monotonic`
        self._device = device
        self._thread = DaemonThread("kv-nccl")
        self._lock = threading.Lock()  # of the two below: a join may end in the thread while the loop aborts
        self._communicator: Communicator | None = None
        self._reason: str | None = None  # why it was aborted
        self._ending: asyncio.Task[None] | None = None

    def run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """The result of `work`, done in the rank's thread after what it was asked for before."""
        return self._thread.submit(work)

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> asyncio.Future[None]:
        """Starts now, and goes on by itself whether or not anybody waits for it: see `wait_joined`."""
        return self._thread.submit(partial(self._join, unique_id, rank, num_ranks))

    async def wait_joined(self, joining: asyncio.Future[None]) -> None:
        """Returns when all ranks have joined.

        Raises:
            TransferError: the others do not come, or the rank is aborted.
        """
        await Patience(_JOIN_S).wait(joining, "joining the communicator", self.ended)

    def post(self, *, send: Rows | None = None, receive: Rows | None = None) -> Posting:
        """One group, which starts after those that were posted before."""
        return Posting(self, self._thread.submit(lambda: self._usable().post(send=send, receive=receive)))

    def is_done(self, group: object) -> asyncio.Future[bool]:
        """Whether the group is; looked at in the thread."""
        return self._thread.submit(lambda: self._usable().is_done(group))

    async def abort(self, reason: str) -> None:
        """Returns when nothing reads or writes memory any more. Idempotent; goes on by itself if we are cancelled."""
        if self._ending is None:
            with self._lock:
                self._reason = reason
            self.ended.set_result(reason)
            self._ending = asyncio.create_task(self._abort())
        await asyncio.shield(self._ending)

    async def _abort(self) -> None:
        self._thread.stop()
        with self._lock:
            communicator = self._communicator
        if communicator is None:
            return  # a join that goes on sees the reason
        if self._thread.pending:
            await asyncio.wait(self._thread.pending, timeout=_SETTLE_S)
        helper = DaemonThread("kv-nccl-abort")  # the rank's own thread may be in a call that only this ends
        aborting = helper.submit(communicator.abort)
        helper.stop()
        while waiting := [call for call in (aborting, *self._thread.pending) if not call.done()]:
            _, silent = await asyncio.wait(waiting, timeout=_SILENCE_S)
            if silent:
                _log.error("the device does not let go of a communicator (%s)", self._reason)
        error = aborting.exception()
        if error is not None:
            _log.error("a communicator could not be aborted: %s", error)

    def _join(self, unique_id: bytes, rank: int, num_ranks: int) -> None:
        communicator = self._device.join(unique_id, rank, num_ranks)
        with self._lock:
            if self._reason is None:
                self._communicator = communicator
                return
        communicator.abort()
        self._usable()

    def _usable(self) -> Communicator:
        with self._lock:
            if self._reason is not None or self._communicator is None:
                raise TransferError(f"the communicator was aborted: {self._reason}")
            return self._communicator


class Posting:
    """One group on its way."""

    def __init__(self, rank: Rank, call: asyncio.Future[object]) -> None:
        self._rank = rank
        self._call = call
        self._posted_s = time.monotonic()

    async def wait(self, patience: Patience) -> None:
        """Returns when the device has done it. If it raises, but for a cancel, the communicator has been aborted.

        Raises:
            TransferError: it broke, or takes too long.
        """
        try:
            group = await self._bounded(self._call, patience)
            pause_s, longest_pause_s = _POLL_S
            while not await self._bounded(self._rank.is_done(group), patience):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_pause_s)
        except Exception as error:
            await self._rank.abort(str(error))
            raise
        self._rank.last_done_s = time.monotonic()

    async def _bounded(self, call: asyncio.Future[_T], patience: Patience) -> _T:
        patience.starts_after(max(self._posted_s, self._rank.last_done_s))
        patience.check("a group of blocks")
        return await patience.wait(call, "a group of blocks", self._rank.ended)
