"""The events of one sequence, carried from the engine's thread to a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from cluster.engine.events import EngineEvent, Failed, Token
from cluster.errors import BatonError


class EventStream(AsyncIterator[list[EngineEvent]]):
    """Lists of events, as many at a time as there are. Ends after the list with the last event.

    Use it under `contextlib.aclosing`: closing it early, or cancelling its reader, aborts the sequence.
    """

    def __init__(self, on_early_close: Callable[[EventStream], None], *, ends_at_first_token: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_early_close = on_early_close
        self._ends_at_first_token = ends_at_first_token
        self.is_submitted = False  # the engine has, or had, its sequence; set and read in the engine's thread
        self._events: list[EngineEvent] = []
        self._error: BatonError | None = None
        self._is_complete = False  # no more events will come
        self._is_closed = False  # nobody reads any more
        self._changed = asyncio.Event()

    # ---- from the engine's thread --------------------------------------------------------------------------------------

    def is_last(self, event: EngineEvent) -> bool:
        """Whether nothing follows `event`."""
        match event:
            case Token(finish_reason=reason):
                return reason is not None or self._ends_at_first_token
            case Failed():
                return True
            case _:
                return False

    def deliver(self, events: Sequence[EngineEvent]) -> bool:
        """Hands events over; False when the reader's event loop is closed."""
        return self._send(events, self.is_last(events[-1]), None)

    def fail(self, error: BatonError) -> bool:
        """Ends the stream: after what was delivered before, its reader gets `error`. False as for `deliver`."""
        return self._send((), True, error)

    def _send(self, events: Sequence[EngineEvent], is_last: bool, error: BatonError | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._accept, events, is_last, error)
        except RuntimeError:  # how asyncio says that the loop is closed
            return False
        return True

    # ---- in the reader's event loop ------------------------------------------------------------------------------------

    def _accept(self, events: Sequence[EngineEvent], is_last: bool, error: BatonError | None) -> None:
        if not self._is_complete:
            self._events.extend(events)
            self._is_complete = is_last
            self._error = error
            self._changed.set()

    async def __anext__(self) -> list[EngineEvent]:
        try:
            while not (self._events or self._is_complete or self._is_closed):
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if self._is_closed:
            raise StopAsyncIteration
        if self._events:
            events, self._events = self._events, []
            return events
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the stream; aborts the sequence unless the reader has its last event. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        if not self._is_complete or self._events:
            self._on_early_close(self)
