"""Rides out a router that restarts: calls it again for a few seconds before a client hears of it.

Every call to the router may be repeated (an admit of the same request replaces the one before), and the next life of the router knows
nothing of what was queued: submitting it again is the gateway's part of the recovery.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from cluster.errors import NoCapacity
from router.control.client import Call

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.5


def patient(call: Call, patience_s: float) -> Call:
    """`call`, repeated while it raises NoCapacity (the router cannot be reached), for at most `patience_s` after the first failure.

    What the router itself answers, NoCapacity too, comes in an envelope and is not repeated.
    """

    async def patient_call(method: str, payload: bytes) -> bytes:
        pause_s = _FIRST_PAUSE_S
        give_up_s: float | None = None
        while True:
            try:
                return await call(method, payload)
            except NoCapacity:
                now_s = time.monotonic()
                give_up_s = give_up_s or now_s + patience_s
                if now_s + pause_s > give_up_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    return patient_call
