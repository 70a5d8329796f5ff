"""The forms of one model that peers take, made once and kept beside their environments."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.comparison.catalog import PEERS, Peer, peers_folder
from benchmarks.comparison.export import export_safetensors
from benchmarks.comparison.failure import PeerError, last_words
from benchmarks.report import progress
from deploy.model_cache import building, is_complete

_EXPORT_TIMEOUT_S: Final = 900.0


def model_for(peer: Peer, folder: Path) -> Path:
    """What `peer` loads of the model in `folder`, a folder that Baton serves.

    Raises:
        PeerError: the form cannot be made.
    """
    match peer.form:
        case "gguf":
            return _gguf(folder)
        case "safetensors":
            return _safetensors(folder)
        case "openvino-int8":
            return _openvino(folder)


def _gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise PeerError(f"{folder.name} has no GGUF file")
    return found[0]


def _safetensors(folder: Path) -> Path:
    if any(folder.glob("*.safetensors")):
        return folder
    target = _kept(folder, "safetensors")
    if not is_complete(target):
        progress(f"writing {folder.name} as safetensors")
        with building(target) as partial:
            export_safetensors(folder, partial)
    return target


def _openvino(folder: Path) -> Path:
    target = _kept(folder, "openvino-int8")
    if not is_complete(target):
        source = _safetensors(folder)
        progress(f"exporting {folder.name} to OpenVINO with int8 weights")
        with building(target) as partial:
            _run_optimum(source, partial)
    return target


def _run_optimum(source: Path, target: Path) -> None:
    command = [str(PEERS["openvino"].folder / "bin" / "optimum-cli"), "export", "openvino", "--model", str(source)]
    command += ["--task", "text-generation-with-past", "--weight-format", "int8", str(target)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_EXPORT_TIMEOUT_S, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    except FileNotFoundError as error:
        raise PeerError("optimum-cli is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"the export to OpenVINO took more than {_EXPORT_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise PeerError(f"the export to OpenVINO failed: {last_words(done.stderr or done.stdout)}")


def _kept(folder: Path, form: str) -> Path:
    """Another checkpoint under the same name is another folder."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors"))
    stats = "".join(f"{path}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\n" for path in files)
    life = hashlib.blake2b(stats.encode(), digest_size=4).hexdigest()
    return peers_folder() / "models" / f"{folder.name}-{life}-{form}"
