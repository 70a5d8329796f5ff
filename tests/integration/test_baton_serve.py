"""`baton serve` from the command line to the last process: what `make serve` runs, with its own Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from deploy.process_tree import await_end, descendants
from tests.conftest import free_port

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


@contextmanager
def baton_serve(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command, in a process group of its own as a shell would start it, and its URL."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    port = free_port()
    options = ["--port", str(port), "--set", f"gateway.grpc_port={free_port()}"]
    command = [sys.executable, "-m", "deploy.cli", "serve", *options, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """What it prints up to the line with `word`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if word in line:
            return said
    raise AssertionError(f"ended without {word!r}:\n{said}")


def test_it_answers_and_leaves_nothing() -> None:
    with baton_serve() as (process, url):
        said = read_until(process, "curl ")
        assert "Paris" in said
        for stage in ("gateway", "queue", "prefill", "transfer", "decode wait", "per token"):
            assert f"    {stage} " in said
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = client.models.list().data[0].id
            question = [{"role": "user", "content": "What is the capital of France?"}]
            answer = client.chat.completions.create(model=model, messages=question, temperature=0)  # type: ignore[arg-type]
        assert "Paris" in str(answer.choices[0].message.content)
        started = descendants(process.pid)
        assert len(started) > 5
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: the whole group hears it
        read_until(process, "stopped")
        assert process.wait(timeout=30) == 0
    assert not await_end(started, timeout_s=1), "processes are left"


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """The weights' file is cut short: only a worker finds out."""
    from deploy.pull import pull_demo

    for path in pull_demo().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[:60_000_000])
    with baton_serve("--set", f"model={tmp_path}") as (process, _):
        read_until(process, "deploying")
        started = descendants(process.pid)
        said = read_until(process, "failed: ")
        assert "Traceback" not in said
        logs = Path(read_until(process, "logs: ").split("logs: ")[1].strip())
        assert any("Traceback" in path.read_text() for path in logs.glob("*.log")), "for who wants to know more"
        assert process.wait(timeout=60) == 1
    assert not await_end(started, timeout_s=1)


def test_a_start_can_be_stopped() -> None:
    with baton_serve() as (process, _):
        read_until(process, "starting Serve")
        started = descendants(process.pid)
        process.terminate()
        assert process.wait(timeout=30) == 0
    assert not await_end(started, timeout_s=1)


def test_a_second_signal_ends_all_at_once() -> None:
    with baton_serve() as (process, _):
        read_until(process, "deploying")
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        read_until(process, "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130
    assert not await_end(started, timeout_s=1)
