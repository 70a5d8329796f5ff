"""Makes the virtual environments of peers, with pip's own configuration. One that is there in the pinned versions is left alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.comparison.catalog import Peer
from benchmarks.comparison.failure import PeerError, last_words
from benchmarks.report import progress

_VENV_TIMEOUT_S: Final = 120.0
_PIP_TIMEOUT_S: Final = 3000.0
_MARK: Final = ".installed"
# Of whatever Python runs it: where packages lie, and the version of one of them.
_WHERE: Final = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
_VERSION: Final = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def is_installed(peer: Peer) -> bool:
    """In the versions of the catalog."""
    mark = peer.folder / _MARK
    return mark.exists() and mark.read_text(encoding="utf-8") == _recipe(peer)


def install(peer: Peer, extra_index: str | None = None) -> None:
    """Takes minutes.

    Args:
        extra_index: another package index, for instance one with CPU builds of torch.

    Raises:
        PeerError: pip's reason.
    """
    if is_installed(peer):
        progress(f"{peer.name} is installed")
        return
    progress(f"{peer.name}: making {peer.folder}")
    shutil.rmtree(peer.folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(peer.folder)], _VENV_TIMEOUT_S)
    progress(f"{peer.name}: installing {', '.join(peer.requirements)} (minutes)")
    index = ["--extra-index-url", extra_index] if extra_index else []
    _pip(peer, "install", *index, *peer.requirements)
    if peer.removed:
        _pip(peer, "uninstall", "--yes", *peer.removed)
    if peer.alias:
        _answer_to(peer, peer.alias)
    (peer.folder / _MARK).write_text(_recipe(peer), encoding="utf-8")


def _pip(peer: Peer, verb: str, *arguments: str) -> None:
    _run([str(peer.python), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments], _PIP_TIMEOUT_S)


def _answer_to(peer: Peer, alias: str) -> None:
    """Metadata under the name that the peer's code asks for: a version with `+cpu` is how vLLM knows its CPU build."""
    distribution = peer.requirements[0].partition("==")[0]
    site = Path(_run([str(peer.python), "-c", _WHERE], _VENV_TIMEOUT_S))
    version = _run([str(peer.python), "-c", _VERSION, distribution], _VENV_TIMEOUT_S).partition("+")[0] + "+cpu"
    folder = site / f"{alias}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {alias}\nVersion: {version}\n", encoding="utf-8")


def _run(command: Sequence[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{Path(command[0]).name} {' '.join(command[1:4])} took more than {timeout_s:.0f} s") from error
    if done.returncode:
        raise PeerError(last_words(done.stderr or done.stdout))
    return done.stdout.strip()


def _recipe(peer: Peer) -> str:
    return json.dumps([peer.requirements, peer.removed, peer.alias])
