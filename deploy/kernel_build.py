"""Builds the native kernels before the workers would, where somebody sees that it takes a minute."""

from __future__ import annotations

from cluster.config import BatonConfig
from cluster.engine.native.build import BuildError, build_library
from deploy.preflight import pools
from deploy.progress import Progress


def build_kernels(config: BatonConfig, progress: Progress) -> None:
    """Returns when they are in the cache, or it is clear that they will not be: the workers then run on torch's, and say so."""
    if not any(pool.kernels == "native" and pool.scheme != "float32" for _, pool in pools(config)):
        return
    try:
        build_library(progress.step)
    except (BuildError, OSError) as error:
        progress.step(f"no native kernels: {error}; torch's serve instead, slower")
