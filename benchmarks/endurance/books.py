"""Whether a cluster still holds something when all requests are over: what `baton doctor --wait` finds."""

from __future__ import annotations

import asyncio
from typing import Final

from deploy.doctor import Unreachable, examine, fetch_books

_PATIENCE_S: Final = 30.0  # cancels may be on their way


async def await_balance(url: str) -> list[str]:
    """What is off in the end, in words: nothing, if the books balance and all is idle. Waits a little for it."""
    try:
        _, found = await asyncio.to_thread(examine, lambda: fetch_books(url), _PATIENCE_S)
    except Unreachable as error:
        return [str(error)]
    if found.is_idle:
        return []
    return [str(finding) for finding in found.findings] or [f"not idle, but {found.verdict}"]
