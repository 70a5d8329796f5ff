"""`python -m benchmarks.soak` on a Baton that it starts itself, from the command line to the last process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import main
from deploy.process_tree import await_end, descendants
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    return [sys.executable, "-m", "benchmarks.soak", *ports, "--rate", "2", "--sample-interval", "0.5", *arguments]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_short_soak_answers_all_and_leaves_nothing(tmp_path: Path) -> None:
    """Half a minute cannot tell whether memory grows: all else can be told."""
    results, picture = tmp_path / "soak.jsonl", tmp_path / "soak.png"
    arguments = ["--duration", "30", "--warm-up", "10", "--results", str(results), "--plot", str(picture)]
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    (line,) = results.read_text().splitlines()
    found = json.loads(line)
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert done.returncode == (1 if found["problems"] else 0), done.stderr
    assert all("grows" in problem for problem in found["problems"]), found["problems"]
    assert (found["errors"], found["books_left"]) == ({}, [])
    assert found["num_sent"] == sum(found["answered"].values()) + sum(found["cancelled"].values()) > 30
    assert 0.05 < sum(found["cancelled"].values()) / found["num_sent"] < 0.45
    roles = {process["name"].rpartition(" ")[0] for process in found["processes"]}
    assert {"Gateway", "Router", "Prefill", "Decode", "raylet", "gcs_server", "ServeController", "ProxyActor", "baton serve"} <= roles
    assert "benchmarks.soak" in roles, "its own memory is told too"
    for process in found["processes"]:
        assert process["num_samples"] >= 24
        assert 0 < process["anonymous_mib"]["end"] < process["rss_mib"]["end"]
    assert "MiB/h" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.cluster
@pytest.mark.slow
def test_ctrl_c_gives_the_figures_so_far(tmp_path: Path) -> None:
    results = tmp_path / "soak.jsonl"
    arguments = command("--duration", "600", "--warm-up", "1", "--progress-interval", "1", "--results", str(results))
    with subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            next(line for line in process.stderr if " answered" in line and " 0 answered" not in line)
            below = descendants(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            said, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert json.loads(results.read_text())["interrupted"]
    assert "MiB/h" in said
    assert not await_end(below, timeout_s=5), "processes are left"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--url", "http://127.0.0.1:1"], "--pid"),
        (["--pid", "1"], "--url"),
        (["--url", "http://127.0.0.1:1", "--pid", "1", "--set", "mode=colocated"], "--set"),
        (["--url", "http://127.0.0.1:1", "--pid", str(2**22 + 1)], "no such process"),
        (["--duration", "60", "--warm-up", "60"], "--warm-up"),
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert fault in capsys.readouterr().err


def test_a_cluster_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", str(free_port()), "--set", "decode.scheme=int3"]) == 1
    assert "decode.scheme" in capsys.readouterr().err


def test_nobody_at_the_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"http://127.0.0.1:{free_port()}", "--pid", str(os.getpid()), "--rate", "1"]) == 1
    assert "Connect" in capsys.readouterr().err or "connect" in capsys.readouterr().err
