"""Builds the native kernels before the workers would, where somebody sees that it takes a minute."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from cluster.config import BatonConfig
from cluster.engine.native.build import BuildError, is_built
from deploy.preflight import pools
from deploy.progress import Progress

_COMMAND: Final = (sys.executable, "-m", "cluster.engine.native.build")  # a process of its own: a build imports torch


def build_kernels(config: BatonConfig, progress: Progress) -> None:
    """Returns when they are in the cache, or it is clear that they will not be: the workers then run on torch's, and say so."""
    if not any(pool.kernels == "native" and pool.scheme != "float32" for _, pool in pools(config)):
        return
    try:
        if is_built():
            return
    except BuildError as error:
        progress.step(f"no native kernels: {error}; torch's serve instead, slower")
        return
    progress.step("building native kernels (once, one to two minutes)")
    done = subprocess.run(_COMMAND, capture_output=True, text=True, check=False)
    if done.returncode:
        progress.step(f"{done.stderr.strip()}; torch's serve instead, slower")
