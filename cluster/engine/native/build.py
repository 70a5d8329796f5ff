"""Builds the native kernels once and loads them: `python -m cluster.engine.native.build` builds ahead.

A library lies in the cache folder under a key of everything that went into it, and is built under a temporary name and renamed, so it is
complete or absent. A lock keeps processes that start together from compiling the same thing side by side.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from cluster.cache import cache_folder

Report = Callable[[str], None]
_LOG: Final = logging.getLogger(__name__)
_NAME: Final = "baton_native"
SOURCES: Final = Path(__file__).parent / "csrc"
# Sums are fused where the code says so and nowhere else: every variant of a kernel must round alike.
_COMPILER_FLAGS: Final = ("-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-pthread")
_BUILD_S: Final = 60
LOADED: Final[dict[str, ModuleType | None]] = {}  # once a process
# In a process of its own: torch loads what it has built, which here is not yet where it belongs.
_COMPILE: Final = "import json, sys; from torch.utils import cpp_extension; cpp_extension.load(**json.loads(sys.argv[1]))"


class BuildError(Exception):
    """Why this machine cannot have native kernels."""


def load_kernels(report: Report = _LOG.info) -> ModuleType | None:
    """The compiled module; None, with one warning in the log, where it cannot be had. Builds it, a minute, the first time on a machine.

    Args:
        report: gets a line before a build.
    """
    if _NAME not in LOADED:
        try:
            LOADED[_NAME] = _import(build_library(report))
        except (BuildError, OSError, ImportError) as error:
            _LOG.warning("no native kernels: %s; linears and attention run through torch instead, slower", error)
            LOADED[_NAME] = None
    return LOADED[_NAME]


def native_module() -> ModuleType:
    """The compiled module, for code that cannot do without.

    Raises:
        RuntimeError: this machine has none.
    """
    module = load_kernels()
    if module is None:
        raise RuntimeError("native kernels are not available on this machine")
    return module


def library_path() -> Path:
    """Where the library for these sources, this compiler and this torch belongs.

    Raises:
        BuildError: there is no compiler, or the platform is another than Linux on x86-64.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"they need Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    digest = hashlib.sha256(repr((_COMPILER_FLAGS, _compiler_version(), importlib.metadata.version("torch"), sys.version)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return cache_folder() / "native" / digest.hexdigest()[:16] / f"{_NAME}.so"


def build_library(report: Report) -> Path:
    """The library for this machine; built, where the cache lacks it. Imports no torch: compiling is another process's.

    Raises:
        BuildError: this machine cannot have one.
        OSError: the cache cannot be written.
    """
    library = library_path()
    if library.exists():
        return library
    library.parent.parent.mkdir(parents=True, exist_ok=True)
    with _lock(library.parent.with_suffix(".lock")):
        if not library.exists():
            report(f"building native kernels (once, about {_BUILD_S} s)")
            _build(library)
    return library


def _build(library: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{library.parent.name}-", dir=library.parent.parent))
    try:
        _compile(partial)
        library.parent.mkdir(exist_ok=True)
        (partial / library.name).rename(library)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _compile(folder: Path) -> None:
    # pip puts ninja beside this interpreter, which is on the path only in an activated environment.
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
    if shutil.which("ninja", path=path) is None:
        raise BuildError("the build tool ninja is not installed")
    arguments = {
        "name": _NAME,
        "sources": [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
        "extra_cflags": _COMPILER_FLAGS,
        "extra_ldflags": ["-pthread"],
        "build_directory": str(folder),
    }
    command = [sys.executable, "-c", _COMPILE, json.dumps(arguments)]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise BuildError(next((line for line in lines if "error:" in line), lines[-1] if lines else "the compiler failed"))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system takes it from one that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler_version() -> str:
    compiler = os.environ.get("CXX", "c++")
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"there is no C++ compiler ({compiler})") from error


def _import(library: Path) -> ModuleType:
    import torch  # noqa: F401  # loads the libraries that this one is linked to

    spec = importlib.util.spec_from_file_location(_NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Builds, or says why not."""
    try:
        library = build_library(lambda line: print(line, flush=True))
        print(f"==> native kernels: {library}")
    except (BuildError, OSError) as error:
        print(f"no native kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
