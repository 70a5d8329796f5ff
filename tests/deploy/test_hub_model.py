"""Models of a hub: `huggingface_hub` runs for real, against a hub on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from cluster.errors import ConfigError
from cluster.model_config import ModelConfig
from deploy import hub_model
from deploy.hub_model import HubId
from deploy.pull import resolve_model, served_name
from tests.conftest import free_port
from tests.deploy.fake_hub import COMMIT, FakeHub, serving
from tests.deploy.tiny_gguf import write_gguf
from tests.tiny_models import tiny_model

ID = "baton-tests/tiny-llama"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "models"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With a tiny model, and what repositories have beside one."""
    files = {path.name: path.read_bytes() for path in tiny_model().iterdir()}
    extra = {"README.md": b"# tiny", "consolidated.safetensors": b"another copy", "original/consolidated.safetensors": b"", "a.bin": b"x"}
    with serving(FakeHub(ID, {**files, **extra})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert caught.value.param == "model"
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_model_comes_once(hub: FakeHub, cache: Path) -> None:
    lines: list[str] = []
    folder = resolve_model(ID, lines.append)
    assert folder == cache / "baton-tests--tiny-llama"
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_model().iterdir()} | {".complete"}
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in tiny_model().iterdir())
    assert lines[1].startswith(f"downloading {ID} (")
    hub.asked.clear()
    assert resolve_model(ID) == folder
    assert hub.asked == [], "the second time, from the cache alone"
    assert served_name(ID, folder) == ID


def test_a_revision_is_another_model(hub: FakeHub, cache: Path) -> None:
    hub.revisions = ("main", "refs/pr/1")
    assert resolve_model(f"{ID}@refs/pr/1") == cache / "baton-tests--tiny-llama@refs%2Fpr%2F1"
    assert any("/revision/refs/pr/1" in line for line in hub.asked)
    assert all(f"/resolve/{COMMIT}/" in line for line in hub.asked if "/resolve/" in line), "one commit, whatever happens to the branch"
    assert served_name(f"{ID}@refs/pr/1", Path()) == ID


def test_a_folder_of_that_name_wins(hub: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(tiny_model(), tmp_path / ID)
    assert resolve_model(ID) == tmp_path / ID
    assert hub.asked == []
    assert served_name(ID, tmp_path / ID) == "tiny-llama"


def test_shards_without_the_copies_beside_them(hub: FakeHub) -> None:
    whole = hub.files.pop("model.safetensors")
    shards = {f"model-0000{i}-of-00002.safetensors": whole for i in (1, 2)}
    hub.files |= shards
    assert {path.name for path in resolve_model(ID).glob("*.safetensors")} == set(shards)


def test_a_gguf_file_gets_its_config_and_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"tiny.gguf": write_gguf(tmp_path / "tiny.gguf").read_bytes(), "README.md": b""}
    folder = resolve_model(ID)
    assert (folder / "tokenizer.json").is_file()
    assert ModelConfig.load(folder).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.Q4.gguf": b"", "a.Q8.gguf": b""}, "2 GGUF files (a.Q4.gguf, a.Q8.gguf)"),
        ({"pytorch_model.bin": b"", "config.json": b"{}"}, "neither *.safetensors nor a *.gguf"),
        ({"model.safetensors": b"", "config.json": b"{}"}, "it lacks tokenizer.json"),
        (
            {"model.safetensors": b"", "tokenizer.json": b"{}", "config.json": b'{"architectures": ["GPT2LMHeadModel"]}'},
            "GPT2LMHeadModel is not supported; known are LlamaForCausalLM, ",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights(hub: FakeHub, cache: Path, files: dict[str, bytes], said: str) -> None:
    hub.files = files
    assert said in refusal(ID)
    assert not [name for name in hub.fetched() if name.endswith((".safetensors", ".gguf"))]
    assert not cache.exists() or list(cache.iterdir()) == []


def test_the_hub_knows_a_gguf_files_architecture(hub: FakeHub) -> None:
    hub.files, hub.gguf_architecture = {"a.gguf": b"none"}, "gemma3"
    assert "unknown architecture 'gemma3' in the GGUF file; known: llama, " in refusal(ID)
    assert hub.fetched() == set()


def test_no_such_model_revision_or_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"'baton-tests/none' is no folder here, and as a hub id: {hub.url} has no such model" in refusal("baton-tests/none")
    assert f"'{ID}@v9' is no folder here, and as a hub id: it has no such revision on" in refusal(f"{ID}@v9")
    assert "no valid id" in refusal("a/b--c")
    hub.is_broken = True
    assert "500" in refusal(ID)
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    assert f"{url} cannot be reached" in refusal(ID)
    monkeypatch.setenv("HF_ENDPOINT", "nowhere")
    assert "nowhere cannot be reached" in refusal(ID)


def test_a_gated_model_wants_a_token(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_tests"
    assert "accepted its terms" in refusal(ID)
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("HF_TOKEN", "hf_tests")
    assert (resolve_model(ID) / "model.safetensors").is_file()


def test_a_cut_connection_is_taken_up_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)
    hub.cut_after = {"model.safetensors": 1000}
    folder = resolve_model(ID)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert [line for line in hub.asked if line.endswith("Range")], "only the rest came again"


def test_a_broken_download_leaves_nothing(hub: FakeHub, cache: Path) -> None:
    hub.cut_after, hub.broken_after_cut = {"model.safetensors": 1000}, True
    assert "500" in refusal(ID)
    assert list(cache.iterdir()) == []
    hub.is_broken = False
    assert (resolve_model(ID) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_no_disk_space_is_said_before_the_weights(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert "0 MB free" in refusal(ID)
    assert "model.safetensors" not in hub.fetched()


def test_progress_is_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_model, "_REPORT_INTERVAL_S", 0.001)
    lines: list[str] = []
    resolve_model(ID, lines.append)
    assert [line for line in lines if " MB of " in line and line.endswith("/s")]


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("org/name", HubId("org/name")),
        ("Org.1/n-a.m_e@v1.0", HubId("Org.1/n-a.m_e", "v1.0")),
        ("name", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("./a", None),
        ("~/a", None),
        ("org/file.gguf", None),
        ("org/name@", None),
    ],
)
def test_what_an_id_is(name: str, parsed: HubId | None) -> None:
    assert HubId.parse(name) == parsed


def test_offline_is_said_and_the_cache_is_enough(hub: FakeHub) -> None:
    command = [sys.executable, "-m", "deploy.cli", "pull", ID]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "HF_HUB_OFFLINE forbids" in done.stderr
    assert "Traceback" not in done.stderr
    folder = resolve_model(ID)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")


def test_ctrl_c_ends_a_download_and_leaves_nothing(hub: FakeHub, cache: Path) -> None:
    hub.stall_in = "model.safetensors"
    command = [sys.executable, "-m", "deploy.cli", "pull", ID]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert hub.stalled.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert list(cache.iterdir()) == []
