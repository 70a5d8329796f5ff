"""A transport without a server."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.requests import LoadRequest


class FakeTransport:
    """Answers after `delay_s`, or when `gate` is set; every third request fails where `failing`."""

    def __init__(self, delay_s: float = 0.0, gate: asyncio.Event | None = None, *, failing: bool = False) -> None:
        self.running = self.most_running = self.num_sent = 0
        self._delay_s, self._gate, self._failing = delay_s, gate, failing
        self.all_sent = asyncio.Event()  # ten of them

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    async def find_model(self) -> str:
        return "tiny"

    async def send(self, request: LoadRequest, model: str, answer: Answer) -> None:
        self.num_sent += 1
        index = self.num_sent
        if index == 10:
            self.all_sent.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._delay_s)
            if self._gate:
                await self._gate.wait()
        finally:
            self.running -= 1
        if self._failing and index % 3 == 0:
            raise LoadError("http_429", "full")
        answer.add_chunk(time.perf_counter(), 1, 2)
        answer.finish(time.perf_counter())
