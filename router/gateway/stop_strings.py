"""Finds the first stop string in a text that arrives in parts, without ever sending a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back only the tail that may still become a stop string.

    The match is the one whose last character comes first (of those that end together, the longest), so it does not depend on how the text
    was cut into parts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be sent now. Once `matched` is set the text ends before the stop string, and nothing more comes."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        pending = self._held + text
        found = [(pending.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in pending]
        if found:
            end, negative_length, self.matched = min(found)
            self._held = ""
            return pending[: end + negative_length]
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """The tail that was held back, when the text is over."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
