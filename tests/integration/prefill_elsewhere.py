"""A real prefill worker in another process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from cluster.config import PoolConfig, TransferConfig
from prefill_worker.worker import PrefillWorker
from tests.harness import Workers, check_books
from tests.other_process import OtherProcess
from tests.worker_client import Elsewhere

_running: Final[list[tuple[Workers, PrefillWorker]]] = []  # over there


@asynccontextmanager
async def prefill_elsewhere(
    there: OtherProcess, folder: Path, plane: str, pool: PoolConfig, transfer: TransferConfig
) -> AsyncIterator[Elsewhere]:
    """Starts it in `there`, and checks its books at the end."""
    address, incarnation = await there.acall(_start, folder, plane, pool, transfer)
    try:
        yield Elsewhere(address, incarnation)
        await there.acall(_check_books)
    finally:
        await there.acall(_close)


async def _start(folder: Path, plane: str, pool: PoolConfig, transfer: TransferConfig) -> tuple[str, str]:
    workers = await Workers(folder, plane, pool, transfer).__aenter__()
    worker = await workers.start_prefill()
    _running.append((workers, worker))
    return worker.endpoint.address, worker.gate.incarnation


async def _check_books() -> None:
    await check_books(_running[-1][1])


async def _close() -> None:
    await _running.pop()[0].__aexit__()
