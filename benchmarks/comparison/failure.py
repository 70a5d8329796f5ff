"""What keeps a contestant out of the table; its reason stands there instead."""

from __future__ import annotations


class PeerError(Exception):
    """A peer that cannot be installed, started, or asked; the message is what it said."""


def last_words(text: str) -> str:
    """The line of a program's output that tells why it ended: the last with an error, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line.partition(":")[0]), lines[-1] if lines else "it said nothing")
