"""Whose communicator uses the device now.

NCCL's kernels wait on the device for their peer. With several communicators on one device, ranks that start them in different orders
can wait for each other for ever; NCCL's user guide ("Using multiple NCCL communicators concurrently") asks for one order on all devices.
Nobody gives such an order to pairs of independent workers. Here it follows from turns: a reader takes its own device's turn before it
asks an owner, who then takes its device's. Owners never wait for readers with a turn in hand but those whom they have answered, and these
have theirs; so no circle of waiting can close.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """One holder at a time, first come first served. A holder may take as many turns at once as it likes while nobody else waits."""

    def __init__(self) -> None:
        self._holder: object = None
        self._num_taken = 0
        self._waiting: deque[tuple[object, asyncio.Future[None]]] = deque()

    async def take(self, holder: object) -> None:
        """Returns when it is `holder`'s turn."""
        if self._num_taken == 0 or (self._holder is holder and not self._waiting):
            self._grant(holder)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((holder, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was granted at the same moment
                self.give()
            raise

    def give(self) -> None:
        """One turn is over."""
        self._num_taken -= 1
        while self._waiting and (self._num_taken == 0 or self._waiting[0][0] is self._holder):
            holder, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._grant(holder)
                turn.set_result(None)
        if self._num_taken == 0:
            self._holder = None

    def _grant(self, holder: object) -> None:
        self._holder = holder
        self._num_taken += 1
