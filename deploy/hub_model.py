"""Brings a model from a hub in the style of Hugging Face, by its id.

The list of files and the small ones come first, so what Baton cannot serve is refused before any weights travel. `HF_ENDPOINT`, `HF_TOKEN`,
`HF_HUB_OFFLINE` and the other variables of `huggingface_hub` hold. What is in the cache is not asked for again: a branch stays as it was.

Files come one after another on the calling thread: `snapshot_download` has threads that a Ctrl-C waits for until their files are whole.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from cluster.model_config import ModelConfig
from deploy.gguf_import import check_architecture, import_gguf
from deploy.hub_errors import explaining, refused
from deploy.model_cache import Report, building, cache_folder, check_space, is_complete

_ID: Final = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^\s@]+))?", re.ASCII)
_SMALL: Final = re.compile(r"config\.json|generation_config\.json|tokenizer[^/]*\.json|chat_template[^/]*")
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_PUBLIC_HUB: Final = "https://huggingface.co"
_REPORT_INTERVAL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name`, or `org/name@revision` with a branch, a tag or a commit."""

    repository: str
    revision: str | None = None

    @staticmethod
    def parse(name: str) -> HubId | None:
        """None for what cannot be an id."""
        found = None if name.endswith(".gguf") else _ID.fullmatch(name)
        return HubId(found["repository"], found["revision"]) if found else None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Its place in the cache."""
        organization, _, rest = str(self).partition("/")
        return cache_folder() / "models" / f"{organization}--{quote(rest, safe='@')}"


@dataclass(frozen=True, slots=True)
class _Listing:
    """One commit of a repository: what Baton takes of it, by size in bytes."""

    commit: str
    small: Mapping[str, int]
    weights: Mapping[str, int]
    gguf_architecture: str | None


def pull_from_hub(hub_id: HubId, report: Report = lambda line: None) -> Path:
    """The model's folder, downloaded when the cache lacks it.

    Raises:
        ConfigError: for `model`: no such repository or revision, no access, no network, no disk space, or a model that Baton cannot serve.
    """
    folder = hub_id.folder
    if is_complete(folder):
        return folder
    disable_progress_bars()  # they would write between the lines of `report`
    with building(folder) as partial, explaining(str(hub_id), _endpoint()):
        report(f"asking {_endpoint()} for {hub_id}")
        listing = _list(hub_id)
        _fetch(hub_id, listing, listing.small, partial)
        _check(hub_id, listing, partial)
        num_bytes = sum(listing.weights.values())
        check_space(partial, num_bytes)
        report(f"downloading {hub_id} ({_size(num_bytes)} of weights)")
        with _reporting(partial, num_bytes, report):
            _fetch(hub_id, listing, listing.weights, partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes on its downloads
        for gguf in partial.glob("*.gguf"):
            report("writing its config and tokenizer")
            import_gguf(gguf, partial)
    return folder


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or _PUBLIC_HUB).rstrip("/")


def _list(hub_id: HubId) -> _Listing:
    info = HfApi(endpoint=_endpoint()).model_info(hub_id.repository, revision=hub_id.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = _weights(hub_id, sorted(sizes))
    return _Listing(
        commit=info.sha or hub_id.revision or "main",
        small={name: size for name, size in sizes.items() if _SMALL.fullmatch(name)},
        weights={name: sizes[name] for name in weights},
        gguf_architecture=(info.gguf or {}).get("architecture"),
    )


def _weights(hub_id: HubId, names: list[str]) -> list[str]:
    """The files that make one copy of the weights; many repositories hold another copy, in another layout or precision, beside it."""
    if "model.safetensors" in names:
        return ["model.safetensors"]
    top = [name for name in names if "/" not in name]
    safetensors = [name for name in top if _SHARD.fullmatch(name)] or [name for name in top if name.endswith(".safetensors")]
    gguf = [name for name in top if name.endswith(".gguf")]
    if not safetensors and len(gguf) > 1:
        raise refused(str(hub_id), f"it has {len(gguf)} GGUF files ({', '.join(gguf)}); download one of them and give its path")
    if not safetensors and not gguf:
        raise refused(str(hub_id), "it has no weights that Baton reads: neither *.safetensors nor a *.gguf")
    return safetensors or gguf


def _check(hub_id: HubId, listing: _Listing, partial: Path) -> None:
    """What can be known without the weights."""
    if not any(name.endswith(".gguf") for name in listing.weights):
        missing = [name for name in ("config.json", "tokenizer.json") if name not in listing.small]
        if missing:
            raise refused(str(hub_id), f"it lacks {' and '.join(missing)}")
    if (partial / "config.json").exists():
        ModelConfig.load(partial)
    elif listing.gguf_architecture is not None:
        check_architecture(listing.gguf_architecture)


def _fetch(hub_id: HubId, listing: _Listing, names: Mapping[str, int], partial: Path) -> None:
    for name in names:
        hf_hub_download(hub_id.repository, name, revision=listing.commit, local_dir=partial, endpoint=_endpoint())


@contextmanager
def _reporting(partial: Path, num_bytes: int, report: Report) -> Iterator[None]:
    """Tells every few seconds how much of `num_bytes` is there."""
    done, started_s = threading.Event(), time.monotonic()
    before = _bytes_in(partial)

    def tell() -> None:
        while not done.wait(_REPORT_INTERVAL_S):
            come = _bytes_in(partial) - before
            rate = come / (time.monotonic() - started_s)
            report(f"{_size(come)} of {_size(num_bytes)} ({come / max(num_bytes, 1):.0%}), {_size(rate)}/s")

    thread = threading.Thread(target=tell, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # renamed meanwhile
            continue
    return total


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
