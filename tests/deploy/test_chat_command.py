"""`baton chat` as a user runs it: in pipes, and in a terminal with real signals."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.deploy.screen import read_until
from tests.deploy.scripted_server import Script, scripted_server

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "deploy.cli", "chat"]
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name != "NO_COLOR"}, "TERM": "xterm"}


def chat(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, input=stdin or "", capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT
    )


def test_a_pipe_gets_the_answer_alone() -> None:
    with scripted_server(Script(("Pa", "ris\x1b[31m."), timings={"queue_s": 0.0})) as server:
        done = chat(server.url, "--seed", "1", "--max-tokens", "9", "Which\ncapital?")
    assert (done.returncode, done.stdout) == (0, "Paris\x1b[31m.\n")
    assert re.fullmatch(r"first token \d+\.\d\d s · 2 tokens · .*queue 0 ms\n", done.stderr)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Which\ncapital?"}]
    assert server.bodies[0].items() >= {"model": "scripted", "seed": 1, "max_tokens": 9}.items()
    assert "temperature" not in server.bodies[0]


def test_stdin_is_one_prompt() -> None:
    with scripted_server(Script(("ok\n",))) as server:
        done = chat(server.url, "--no-timings", "--model", "mine", stdin="one\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert server.bodies[0]["model"] == "mine"
    assert "x-baton-timings" not in server.headers[0]


def test_no_answer_is_one_line_and_exit_code_1() -> None:
    with scripted_server(Script(status=429, error={"message": "full"}, headers={"Retry-After": "3"})) as server:
        done = chat(server.url, "hi")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "baton: HTTP 429: full (try again in 3 s)\n")
    url = f"http://127.0.0.1:{free_port()}"
    done = chat(url, "hi")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"baton: cannot connect to {url}: Connection refused\n")


@pytest.mark.parametrize(
    ("arguments", "said"), [(["ftp://x"], "URL: expected http"), (["http://x", ""], "PROMPT: is empty"), ([], "PROMPT: is empty")]
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    done = chat(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"baton: {said}")


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._before = ""
        self._since = ""  # the last keys

    @property
    def seen(self) -> str:
        """All that the screen has shown."""
        return self._before + self._since

    def type(self, keys: str) -> None:
        """Presses keys."""
        self._before, self._since = self.seen, ""
        os.write(self._descriptor, keys.encode())

    def leave_by(self, key: str) -> int:
        """Presses `key` at the prompt; the exit code. A signal that comes just before readline waits is seen at the next key only."""
        for _ in range(20):
            self.type(key)
            try:
                return self.process.wait(1)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(self.seen)

    def read_until(self, *texts: str) -> None:
        """Returns when the screen has shown these texts, in this order, since the last keys."""
        self._since = read_until(self._descriptor, *texts, seen=self._since)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """The terminal's Ctrl-C is a signal to the command, as in a shell."""
    outer, inner = pty.openpty()
    setup = "import os, sys, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", setup, *COMMAND, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, env=ENVIRONMENT) as process:
        os.close(inner)
        try:
            yield Terminal(process, outer)
        finally:
            process.kill()
            os.close(outer)


def test_ctrl_c_ends_an_answer_and_then_the_chat() -> None:
    with scripted_server(Script(("half an ans",), stalls=True), Script(("whole",))) as server, terminal(server.url) as screen:
        screen.read_until("> ")
        screen.type("long one\n")
        screen.read_until("half an ans")
        screen.type("\x03")
        screen.read_until("cancelled", "> ")
        assert server.left.wait(10), "the server hears of it"
        screen.type("short one\n")
        screen.read_until("1 token", "> ")
        assert screen.leave_by("\x03") == 0
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["long one", "half an ans", "short one"]
    assert "Traceback" not in screen.seen


def test_commands_and_errors_in_a_chat() -> None:
    scripts = (Script(status=503, error={"message": "no worker"}), Script(("\x1b[2Jfine",)), Script(("again",)))
    with scripted_server(*scripts) as server, terminal(server.url) as screen:
        screen.read_until("> ")
        for line, said in (
            ("first", "HTTP 503: no worker"),
            ("second", "�[2Jfine"),  # no escape sequence of a model reaches the terminal
            ("/nonsense", "/nonsense is no command"),
            ("/help", "forget the conversation"),
            ("/system Be brief.", "system message set"),
            ("/reset", "forgotten"),
            (" /etc is what?", "again"),
        ):
            screen.type(f"{line}\n")
            screen.read_until(said, "> ")
        assert screen.leave_by("\x04") == 0
    assert "\x1b[2m" in screen.seen, "figures are dim"
    assert [m["content"] for m in server.bodies[2]["messages"]] == ["Be brief.", "/etc is what?"]
