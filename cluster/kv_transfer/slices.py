"""A read in slices: what one call of a library moves, and what a cancel waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cluster.errors import BatonError


async def in_slices(num_rows: int, slice_rows: int, transfer: Callable[[slice], Awaitable[None]]) -> None:
    """Runs `transfer` for every slice of `num_rows` rows, all at the same time; ends when all of them have.

    Raises:
        BatonError: what the first one that failed raised. The others are cancelled.
    """
    failed: BatonError | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for start in range(0, num_rows, slice_rows):
                group.create_task(_run(transfer, slice(start, min(start + slice_rows, num_rows))))
    except* BatonError as errors:
        failed = _first(errors)
    if failed is not None:
        raise failed


async def _run(transfer: Callable[[slice], Awaitable[None]], rows: slice) -> None:
    await transfer(rows)


def _first(errors: BaseExceptionGroup[BatonError]) -> BatonError:
    error = errors.exceptions[0]
    return error if isinstance(error, BatonError) else _first(error)
