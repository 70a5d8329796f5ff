"""Ends a step early once most of it is for nobody: a client that leaves must not cost the others the rest of a long chunk.

The decoder looks before each layer. A step that ends early has computed nothing: its rows stay where they were, and what it has written
lies behind their last computed token, where the next step writes the same again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np

from cluster.engine.sequence import ScheduledSequence


class StepInterrupted(Exception):
    """The step has ended early."""


class Interrupt:
    """One byte, which the native kernels read by its address."""

    def __init__(self) -> None:
        self._flag = np.zeros(1, np.uint8)

    @property
    def address(self) -> int:
        return self._flag.ctypes.data

    def set(self) -> None:
        """The running step ends before its next layer. Any thread."""
        self._flag[0] = 1

    def clear(self) -> None:
        """For the next step."""
        self._flag[0] = 0

    def check(self) -> None:
        """
        Raises:
            StepInterrupted: it is set.
        """
        if self._flag[0]:
            raise StepInterrupted


class Audience:
    """Who waits for the running step. It is interrupted when more than half of its tokens are of sequences that nobody waits for."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._lock = Lock()
        self._waiting: dict[str, int] = {}  # tokens of the running step, by `Request.key`
        self._num_tokens = 0  # of all rows of the running step

    @contextmanager
    def watching(self, rows: Sequence[ScheduledSequence]) -> Iterator[None]:
        """While `rows` are computed."""
        with self._lock:
            self._waiting = {row.sequence.key: row.num_scheduled_tokens for row in rows}
            self._num_tokens = sum(self._waiting.values())
        try:
            yield
        finally:
            with self._lock:
                self._waiting = {}
                self._interrupt.clear()

    def leave(self, key: str) -> None:
        """Nobody waits for this sequence any more. Any thread."""
        with self._lock:
            if self._waiting.pop(key, None) is not None and 2 * sum(self._waiting.values()) < self._num_tokens:
                self._interrupt.set()
