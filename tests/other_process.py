"""Another Python process with an event loop of its own, which calls functions for us.

    with OtherProcess() as there:
        address = there.call(start_something, "its name")

A function is named by its module, so what it should keep between calls lies in that module's globals, over there.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import signal
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_END_S = 10.0


class OtherProcess:
    """Starts at once; ends with `close`, or with this process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(max_workers=1)  # one, whatever happens: tests count threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `function`, of a module's top level, returns over there. Blocks until it does.

        Raises:
            AssertionError: it raised; the message is the traceback.
            EOFError: the process has ended.
        """
        returned: R = self._call(function, args, kwargs)
        return returned

    async def acall(self, function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for a coroutine function, without holding up our own event loop. One at a time."""
        returned: R = await asyncio.get_running_loop().run_in_executor(self._thread, self._call, function, args, kwargs)
        return returned

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            self._calls.send((function, args, kwargs))
            failure, result = self._calls.recv()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other process has ended") from error
        if failure is not None:
            raise AssertionError(f"in the other process:\n{failure}")
        return result

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends it by SIGKILL. Idempotent."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._thread.shutdown()
        self._calls.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self.kill()


def _live(calls: Connection) -> None:
    with suppress(KeyboardInterrupt):  # which a terminal sends to us too
        asyncio.run(_serve(calls))


async def _serve(calls: Connection) -> None:
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(max_workers=1)
    while True:
        try:
            function, args, kwargs = await loop.run_in_executor(thread, calls.recv)
        except EOFError:
            return
        try:
            result = function(*args, **kwargs)
            failure, result = None, await result if inspect.isawaitable(result) else result
        except BaseException:
            failure, result = traceback.format_exc(), None
        calls.send((failure, result))
