"""How long a wait for a device or a peer goes on."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, TypeVar

from cluster.errors import TransferError

_LOOK_S: Final = 0.05  # how soon a wait notices that its time has become shorter

_T = TypeVar("_T")


class Patience:
    """The time that one transfer has, counted from when it was asked for or from the last sign of life."""

    def __init__(self, limit_s: float, hurried_s: float | None = None) -> None:
        """
        Args:
            limit_s: after which it is given up.
            hurried_s: the same, once nobody wants it any more; default: `limit_s`.
        """
        self._limit_s = limit_s
        self._hurried_s = limit_s if hurried_s is None else hurried_s
        self._started_s = time.monotonic()

    def hurry(self) -> None:
        """Nobody wants it any more."""
        self._limit_s = self._hurried_s

    def starts_after(self, moment_s: float) -> None:
        """Its turn came at `moment_s` of `time.monotonic` at the earliest: what came before it had a patience of its own."""
        self._started_s = max(self._started_s, moment_s)

    def check(self, what: str) -> None:
        """Raises:
        TransferError: `what` takes too long.
        """
        if time.monotonic() - self._started_s > self._limit_s:
            raise TransferError(f"{what} took longer than {self._limit_s:g} s")

    async def wait(self, work: asyncio.Future[_T], what: str, ended: asyncio.Future[str] | None = None) -> _T:
        """The result of `work`, which goes on by itself when we are cancelled or give it up.

        Raises:
            TransferError: `what` takes too long, or `ended` is done first; its result says why.
        """
        watched: list[asyncio.Future[Any]] = [work] if ended is None else [work, ended]
        while not work.done():
            if ended is not None and ended.done():
                raise TransferError(f"{what} was given up: {ended.result()}")
            self.check(what)
            await asyncio.wait(watched, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        return work.result()
