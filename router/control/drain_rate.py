"""How fast the queue drains while it holds something: `Retry-After` and the early refusal of hopeless deadlines are estimated from it.

Times without a queue tell nothing, so only requests that waited are counted, each with the time it was the first in line.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_WINDOW_S: Final = 30.0
_MIN_SAMPLES: Final = 8
_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0


class DrainRate:
    """Placements from the queue in the last half minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (when placed, seconds since the placement before)
        self._last_placed_s = float("-inf")

    def placed(self, queued_at_s: float, now_s: float) -> None:
        """One request left the queue for a worker."""
        if now_s > queued_at_s:
            self._samples.append((now_s, now_s - max(queued_at_s, self._last_placed_s)))
        self._last_placed_s = now_s
        self._prune(now_s)

    def wait_s(self, num_ahead: int, now_s: float) -> float | None:
        """How long until `num_ahead` requests have gone; None while too little is known to say."""
        self._prune(now_s)
        if len(self._samples) < _MIN_SAMPLES:
            return None
        return num_ahead * sum(interval_s for _, interval_s in self._samples) / len(self._samples)

    def retry_after_s(self, num_ahead: int, now_s: float) -> float:
        """When a refused client may try again: about when what is queued now has gone, between one second and a minute."""
        wait_s = self.wait_s(num_ahead, now_s)
        return _MIN_RETRY_S if wait_s is None else min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def _prune(self, now_s: float) -> None:
        while self._samples and now_s - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
