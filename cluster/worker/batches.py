"""What an engine's event streams look like to the services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from cluster.engine.events import EngineEvent


class EventBatches(Protocol):
    """An async iterator of lists of events, as many at a time as there are. Closing it early aborts its sequence."""

    def __aiter__(self) -> AsyncIterator[list[EngineEvent]]: ...

    async def __anext__(self) -> list[EngineEvent]: ...

    async def aclose(self) -> None: ...
