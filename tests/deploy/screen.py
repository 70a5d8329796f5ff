"""What a command writes to its terminal."""

from __future__ import annotations

import os
import re
import select
import time

LIMIT_S = 30.0


def read_until(descriptor: int, *texts: str, seen: str = "") -> str:
    """`seen` and what comes after it, as soon as that holds these texts in this order.

    Raises:
        AssertionError: it does not within `LIMIT_S`, even if nothing comes at all.
    """
    pattern = re.compile(".*".join(map(re.escape, texts)), re.DOTALL)
    deadline_s = time.monotonic() + LIMIT_S
    while not pattern.search(seen):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        assert ready, f"{texts} did not come: {seen!r}"
        seen += os.read(descriptor, 4096).decode(errors="replace")
    return seen
