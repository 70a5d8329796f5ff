"""The open worker calls of one attempt, and the tasks that read them: what one `close` ends together. And how an attempt fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cluster.errors import BatonError, InternalError, NoCapacity
from cluster.types import WorkerAddress
from router.gateway.worker_clients import WorkerStream

T = TypeVar("T")


class Legs:
    """Everything that must not outlive the attempt."""

    def __init__(self) -> None:
        self._streams: list[WorkerStream[Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def open(self, stream: WorkerStream[T]) -> WorkerStream[T]:
        """Takes charge of a call."""
        self._streams.append(stream)
        return stream

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs `work` beside the caller."""
        task = asyncio.create_task(work)
        task.add_done_callback(_retrieve)
        self._tasks.append(task)
        return task

    async def linked(self, work: Coroutine[Any, Any, T], other: asyncio.Task[Any]) -> T:
        """The result of `work`, unless the other leg fails first: then that leg's error."""
        task = self.spawn(work)
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            other.result()
        return await task

    def close(self) -> None:
        """Cancels it all, without waiting. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.cancel()
        self._tasks.clear()
        self._streams.clear()


def _retrieve(task: asyncio.Task[Any]) -> None:
    # A leg that failed after its run had ended is nobody's news.
    if not task.cancelled():
        task.exception()


def expect(event: Any, kind: str) -> Any:
    """`event`, a message with the oneof `event`, when that is `kind`.

    Raises:
        InternalError: it is another, or the stream is over.
    """
    found = "the end of the stream" if event is None else event.WhichOneof("event")
    if found != kind:
        raise InternalError(f"the worker sent {found} where {kind} was due")
    return event


class AttemptFailed(Exception):
    """A worker could not serve the attempt; another may."""

    def __init__(self, error: BatonError, worker: WorkerAddress) -> None:
        super().__init__(error.message)
        self.error = error
        self.worker = worker


@contextmanager
def blaming(worker: WorkerAddress) -> Iterator[None]:
    """What a worker cannot do now becomes `AttemptFailed`, which names the worker."""
    try:
        yield
    except NoCapacity as error:
        raise AttemptFailed(error, worker) from error
