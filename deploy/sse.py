"""Server-sent events as OpenAI servers stream them: one line of data an event, and `[DONE]` at the end."""

from __future__ import annotations


def event_data(line: bytes) -> bytes | None:
    """The data of one line; None for blank lines, comments, other fields and `[DONE]`, which say nothing."""
    data = line[5:].strip() if line.startswith(b"data:") else b""
    return data if data and data != b"[DONE]" else None
