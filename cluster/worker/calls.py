"""The calls a worker is serving. Each is refused, or runs to its end, or is cancelled; none is forgotten.

admitted ── work ended ──► answered OK
    │    ── BatonError ──► answered with that error
    │    ── cancelled by the caller or its deadline ──► work unwinds; nobody reads an answer
    └──► cancelled by the drain ──► work unwinds; answered with Draining
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio

from cluster import rpc
from cluster.errors import BatonError, Draining, InternalError, WorkerRefusal
from cluster.pb import worker_pb2 as pb
from cluster.worker.gate import Gate

_log = logging.getLogger(__name__)


class LiveCalls:
    """Serves calls that passed the gate, and can wait for them or end them. Use it on one event loop."""

    def __init__(self, gate: Gate, on_end: Callable[[], None]) -> None:
        """`on_end` is called after each call, when whatever it held has been given back."""
        self._gate = gate
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._aborted: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def serve(
        self,
        header: pb.Header,
        key: str,
        context: aio.ServicerContext[Any, Any],
        work: Callable[[], Awaitable[None]],
    ) -> None:
        """Checks the header, runs `work` as the call `key`, and answers with its error if it raises one."""
        try:
            self._gate.check(header)
            await self._tracked(key, work)
        except BatonError as error:
            await rpc.abort(context, error)
        except Exception:
            _log.exception("call %s failed", key)
            await rpc.abort(context, InternalError("the worker failed; its log says why"))

    async def _tracked(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        if key in self._tasks:
            raise WorkerRefusal(f"attempt {key} is already running here", param="attempt")
        task = asyncio.current_task()
        assert task is not None
        self._tasks[key] = task
        self._idle.clear()
        try:
            await work()
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            task.uncancel()
            raise Draining("the worker stopped before the request was done") from None
        finally:
            self._forget(key, task)

    def _forget(self, key: str, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        self._aborted.discard(task)
        if not self._tasks:
            self._idle.set()
        self._on_end()

    async def wait_idle(self) -> None:
        """Returns when no call is running."""
        await self._idle.wait()

    def abort(self) -> None:
        """Ends all calls; their callers get Draining."""
        for task in self._tasks.values():
            self._aborted.add(task)
            task.cancel()
