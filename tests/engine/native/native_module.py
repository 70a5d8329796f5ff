"""Builds and loads the attention kernels alone."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch.utils.cpp_extension

_SOURCES = Path(__file__).parents[3] / "cluster" / "engine" / "native" / "csrc"
_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]


@cache
def load_native() -> ModuleType:
    """The module, built at the first call after a change."""
    os.environ["PATH"] += f":{Path(sys.executable).parent}"  # where pip puts ninja
    sources = [*sorted(_SOURCES.glob("*.cpp")), Path(__file__).with_name("attention_module.cpp")]
    module: ModuleType = torch.utils.cpp_extension.load(
        name="baton_attention",
        sources=[str(path) for path in sources],
        extra_cflags=_FLAGS,
        extra_include_paths=[str(_SOURCES)],
    )
    return module
