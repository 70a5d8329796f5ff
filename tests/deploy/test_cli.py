"""`baton` as a user runs it: what is wrong stops it before a process is started, in one line a key, with exit code 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import __version__
from tests.conftest import free_port
from tests.deploy.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (["decode.schme=bf16", "router.max_queued_requests=0"], ["decode.schme: no such key", "router.max_queued_requests: "]),
        (["model=no-such-model"], ["'no-such-model' is neither the demo model"]),
        (["decode.kv_cache_bytes=1000TiB"], ["decode.kv_cache_bytes: the KV pools need"]),
    ],
)
def test_a_wrong_config_stops_it_before_anything_starts(settings: list[str], lines: list[str], tmp_path: Path) -> None:
    done = baton("serve", "--port", str(free_port()), *(part for s in settings for part in ("--set", s)), RAY_TMPDIR=str(tmp_path / "ray"))
    assert done.returncode == 2
    said = done.stderr.splitlines()
    assert len(said) == len(lines), done.stderr
    for line, expected in zip(said, lines, strict=True):
        assert line.startswith("baton: ")
        assert expected in line
    assert "starting Ray" not in done.stdout
    assert not (tmp_path / "ray").exists()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = baton("serve", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"baton: http_options.port: {port} on 127.0.0.1 is in use")


def test_pull_prints_the_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "own.gguf", weights=True)
    done = baton("pull", str(path), BATON_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "arguments", [["fly"], ["serve", "--prot", "1"], ["serve", "--port", "x"], ["bench", "--rate", "0"], ["pull", "a", "b"]]
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str]) -> None:
    done = baton(*arguments)
    assert done.returncode == 2
    assert "usage: baton" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_is_the_load_generator() -> None:
    done = baton("bench", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "does not answer (connect)" in done.stderr
    assert "Traceback" not in done.stderr
    done = baton("bench", "--search")
    assert (done.returncode, done.stderr) == (2, "baton: --search needs an SLO to attain, as --slo ttft=2.0\n")


def test_alone_it_prints_its_help() -> None:
    done = baton()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == baton("--help").stdout


def test_version() -> None:
    done = baton("--version")
    assert (done.returncode, done.stdout) == (0, f"baton {__version__}\n")


@pytest.mark.parametrize("command", ["serve", "chat", "status", "pull", "bench"])
def test_every_command_has_help_with_examples(command: str) -> None:
    done = baton(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: baton {command} ")
    assert f"examples:\n  baton {command}" in done.stdout
    assert f"| `baton {command}" in (ROOT / "README.md").read_text(encoding="utf-8"), "in the README's table"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m deploy.cli --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
