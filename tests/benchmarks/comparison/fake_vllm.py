"""An environment of vLLM's, as `--install` would make it, whose Python runs a script instead."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.comparison.catalog import PEERS


def install_fake_vllm(root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A `vllm` whose Python runs `script`; the folder of a model."""
    monkeypatch.setenv("BATON_CACHE", str(root / "cache"))
    peer = PEERS["vllm"]
    peer.python.parent.mkdir(parents=True)
    (peer.folder / ".installed").write_text(json.dumps([peer.requirements, peer.removed, peer.alias]))
    (root / "server.py").write_text(script)
    peer.python.write_text(f'#!/bin/sh\nexec {sys.executable} {root / "server.py"} "$@"\n')
    peer.python.chmod(0o755)
    model = root / "some-model"
    model.mkdir()
    (model / "model.safetensors").touch()
    return model
