"""The cache of models: folders that are complete or absent.

It is `$BATON_CACHE`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`. A folder there is built under a temporary name beside its final
one and renamed at the end; `.complete` lists the sizes of its files, which is all that later starts check.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError

Report = Callable[[str], None]
_MARK: Final = ".complete"


def cache_folder() -> Path:
    """Where models are kept."""
    if chosen := os.environ.get("BATON_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def is_complete(folder: Path) -> bool:
    """Whether `folder` was built to its end, and its files have kept their sizes."""
    try:
        sizes = json.loads((folder / _MARK).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and goes away otherwise.

    Raises:
        ConfigError: for `model`, when the cache cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        partial.chmod(0o755)
        try:
            yield partial
            (partial / _MARK).write_text(json.dumps({path.name: path.stat().st_size for path in partial.iterdir()}))
            _replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise ConfigError(f"cannot write {folder}: {reason}", param="model") from error


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises:
    ConfigError: for `model`, when the disk of `folder` has less than `needed_bytes` free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ConfigError(f"{folder.parent} has {free / 1e6:.0f} MB free, {needed_bytes / 1e6:.0f} MB are needed", param="model")


def _replace(partial: Path, folder: Path) -> None:
    if is_complete(folder):
        return  # another start was faster
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
