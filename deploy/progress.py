"""The lines that a start prints: what is done, and how long after the start."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TextIO


class Progress:
    """Prints steps with the time since it was made."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def step(self, text: str) -> None:
        """One step, with its time."""
        self.line(f"==> {self.elapsed_s:5.1f} s  {text}")

    def line(self, text: str = "") -> None:
        """Plain text. A reader that went away does not keep the start, or the end, from going on."""
        with suppress(OSError):
            print(text, file=self._out, flush=True)
