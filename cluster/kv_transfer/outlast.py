"""Waiting for work on KV memory that goes on whatever happens to us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def outlast(work: asyncio.Future[T], on_cancel: Callable[[], object]) -> T:
    """The result of `work`. When we are cancelled, `on_cancel` is called, and the cancellation goes on only once `work` has ended."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        on_cancel()
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue  # a second cancel must not free rows that are still written
        work.exception()  # seen, and of no interest any more
        raise
