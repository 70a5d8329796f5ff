"""Makes a process fit to run an engine's thread beside an event loop."""

from __future__ import annotations

import sys
from typing import Final

import torch

# The engine's thread holds the GIL between kernels; at Python's default of 5 ms each of its steps would delay every message so long.
_SWITCH_INTERVAL_S: Final = 0.0005


def prepare_process(num_threads: int) -> None:
    """Call it once, before the engine is built."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    torch.set_num_threads(num_threads)
