"""Where Baton keeps what it can bring or build again: models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$BATON_CACHE`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`. It need not exist."""
    if chosen := os.environ.get("BATON_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
