"""Whether an idle cluster still holds something for requests that are over."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import aiohttp

_PATIENCE_S: Final = 15.0  # workers tell their books twice a second, and cancels may be on their way
_POLL_S: Final = 0.5


async def await_balance(url: str) -> dict[str, int]:
    """What is left when all requests are over: nothing, if the books balance. Waits a little for it.

    Raises:
        aiohttp.ClientError: the cluster does not tell.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE_S)) as session:
        while True:
            async with session.get(f"{url}/v1/cluster") as response:
                response.raise_for_status()
                left = unbalanced(await response.json())
            if not left or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(_POLL_S)


def unbalanced(cluster: dict[str, Any]) -> dict[str, int]:
    """What `/v1/cluster` says is queued, placed, owned or leased, by name."""
    left = {"queued": cluster["queue"]["num_requests"], "placed": sum(cluster["live_placements"].values())}
    for role, pool in cluster["pools"].items():
        left |= {f"{role} blocks {state}": pool["kv_blocks"][state] for state in ("owned", "leased")}
    return {name: count for name, count in left.items() if count}
