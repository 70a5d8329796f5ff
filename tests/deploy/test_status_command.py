"""`baton status` as a user runs it: once, in a pipe, in a terminal, and with a server that goes away."""

from __future__ import annotations

import copy
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port
from tests.deploy.screen import read_until
from tests.deploy.scripted_server import ScriptedServer, scripted_server
from tests.router.control.builders import Cluster, load, prefill_load

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "deploy.cli", "status"]


def books() -> dict[str, Any]:
    cluster = Cluster()
    cluster.report(prefill_load(), load("decoder", num_blocks_owned=50))
    model = {"name": "tiny", "max_model_len": 8192, "system_fingerprint": "baton-int8"}
    return {"model": model, **cluster.router.snapshot()}


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_once_and_json() -> None:
    with scripted_server() as server:
        server.get["/v1/cluster"] = (200, books())
        done = status(server.url, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == server.get["/v1/cluster"][1]
        done = status(server.url, "--once", "--interval", "0.1")
        assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(server.url)
    assert lines[1] == "model   tiny, context 8,192, baton-int8"
    assert "████████░░░░░░░░" in next(line for line in lines if "decoder" in line)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("flags", [[], ["--once"], ["--json"]])
def test_no_baton_at_the_start(flags: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = status(url, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"baton: cannot connect to {url}: Connection refused\n")
    with scripted_server() as server:
        done = status(server.url, *flags)
        assert (done.returncode, done.stderr) == (1, f"baton: {server.url} is no Baton: it has no /v1/cluster\n")
        server.get["/v1/cluster"] = (503, {"error": {"message": "the router does not answer: timeout"}})
        done = status(server.url, *flags)
        assert (done.returncode, done.stderr) == (1, "baton: HTTP 503: the router does not answer: timeout\n")


def test_wrong_usage() -> None:
    for arguments in (["ftp://x"], ["--interval", "0"], ["--interval", "x"]):
        done = status(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def change(server: ScriptedServer, tokens: int) -> None:
    """The workers' next reports."""
    content = copy.deepcopy(server.get["/v1/cluster"][1])
    for pool in content["pools"].values():
        for worker in pool["workers"]:
            worker["num_tokens_total"] += tokens
    server.get["/v1/cluster"] = (200, content)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_drawn_over_and_left_as_it_was(number: signal.Signals) -> None:
    outer, inner = pty.openpty()
    with scripted_server() as server:
        server.get["/v1/cluster"] = (200, books())
        environment = {**os.environ, "COLUMNS": "100", "LINES": "24"}
        command = [*COMMAND, server.url, "--interval", "0.1"]
        with subprocess.Popen(command, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, env=environment) as process:
            os.close(inner)
            seen = read_until(outer, "decoder")
            assert "\x1b[?25l" in seen
            change(server, tokens=1000)
            seen = read_until(outer, "running")
            assert "\x1b[2J" not in seen, "drawn over, without a flicker"
            server.get["/v1/cluster"] = (503, {"error": {"message": "the router is away"}})
            seen = read_until(outer, "NO ANSWER, as it was ")
            seen += read_until(outer, "HTTP 503: the router is away")
            server.get["/v1/cluster"] = (200, books())
            read_until(outer, "\x1b[J\x1b[H" + server.url)
            process.send_signal(number)
            assert "Traceback" not in read_until(outer, "\x1b[?25h")
            assert process.wait(10) == 0
    os.close(outer)


def test_a_pipe_gets_a_block_an_interval() -> None:
    with scripted_server() as server:
        server.get["/v1/cluster"] = (200, books())
        command = [*COMMAND, server.url, "--interval", "0.1"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline().rstrip("\n") for _ in range(30)]
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=10)
        assert (process.returncode, said) == (0, "")
    starts = [index for index, line in enumerate(lines) if line.startswith(server.url)]
    assert len(starts) > 1
    assert lines[starts[1] - 1] == "", "an empty line between two"
    assert not any("\x1b" in line for line in lines)
