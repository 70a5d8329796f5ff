"""A thread for calls into a library that may never come back: it is a daemon, so such a call does not hold up the process's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from cluster.errors import TransferError

_T = TypeVar("_T")


class DaemonThread:
    """Runs what it is given, one after the other. Use it on one event loop."""

    def __init__(self, name: str) -> None:
        self.pending: set[asyncio.Future[Any]] = set()  # submitted and not done
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self.stopped = False
        Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()

    def submit(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """The result of `work`. Cancelling it does not stop the work; once the thread was stopped, it is a TransferError."""
        if self.stopped:
            refused: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
            refused.set_exception(TransferError("the thread was stopped"))
            refused.exception()  # seen, whether or not anybody waits for it
            return refused
        future: Future[_T] = Future()
        result = asyncio.wrap_future(future)
        self.pending.add(result)
        result.add_done_callback(self._forget)
        self._queue.put(_Work(work, future))
        return result

    def stop(self) -> None:
        """Ends the thread after what it has been given. Idempotent."""
        if not self.stopped:
            self.stopped = True
            self._queue.put(None)

    def _forget(self, result: asyncio.Future[Any]) -> None:
        self.pending.discard(result)
        if not result.cancelled():
            result.exception()  # seen, whether or not anybody waits for it


class _Work:
    def __init__(self, call: Callable[[], Any], future: Future[Any]) -> None:
        self._call = call
        self._future = future

    def run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        work.run()
        del work  # what it holds, a tensor perhaps, must not wait for the next one
