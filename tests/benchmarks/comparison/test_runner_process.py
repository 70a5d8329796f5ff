"""The protocol, with a peer that is a script: what it answers, how it fails, and that it is gone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.runner_process import Contestant, RunnerProcess
from deploy.process_tree import descendants

TIMEOUT_S = 60.0
_PEER = """
import os, subprocess, sys, time
from benchmarks.comparison.runners.protocol import serve

def generate(prompts, max_tokens):
    {body}

def load():
    print("a library that prints")
    {load}
    return generate, {{"version": "1.0"}}

serve(load)
"""
_ECHO = "return [max_tokens for _ in prompts]"

Start = Callable[..., RunnerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def started(body: str = _ECHO, load: str = "pass") -> RunnerProcess:
        script = tmp_path / "peer.py"
        script.write_text(_PEER.format(body=body, load=load))
        root = Path(__file__).resolve().parents[3]
        contestant = Contestant("fake", (sys.executable, str(script)), {"PYTHONPATH": str(root)})
        return RunnerProcess(contestant, tmp_path / "logs" / "fake.log")

    return started


def test_loading_is_outside_the_figures(start: Start) -> None:
    with start("time.sleep(0.05); return [max_tokens for _ in prompts]") as runner:
        assert runner.start(TIMEOUT_S) == {"version": "1.0"}
        first, second = (runner.run([(1, 2), (3,)], 5, TIMEOUT_S) for _ in range(2))
    assert first.num_tokens == second.num_tokens == (5, 5)
    assert first.duration_s >= 0.05


def test_what_a_library_prints_is_in_the_log_and_no_answer(start: Start, tmp_path: Path) -> None:
    with start("print('{\"noise\": 1}'); return [max_tokens]") as runner:
        runner.start(TIMEOUT_S)
        assert runner.run([(1,)], 2, TIMEOUT_S).num_tokens == (2,)
    said = (tmp_path / "logs" / "fake.log").read_text()
    assert "a library that prints" in said and "noise" in said


def test_it_fails_to_load(start: Start) -> None:
    with start(load="raise ImportError('no AVX-512')") as runner, pytest.raises(PeerError, match="ImportError: no AVX-512"):
        runner.start(TIMEOUT_S)


def test_it_ends_while_it_loads(start: Start) -> None:
    load = "print('ERROR: illegal instruction', flush=True); os._exit(1)"
    with start(load=load) as runner, pytest.raises(PeerError, match="it ended: ERROR: illegal instruction"):
        runner.start(TIMEOUT_S)


def test_one_call_fails_and_the_next_does_not(start: Start) -> None:
    with start("assert max_tokens < 9, 'too many'; return [max_tokens]") as runner:
        runner.start(TIMEOUT_S)
        with pytest.raises(PeerError, match="AssertionError: too many"):
            runner.run([(1,)], 9, TIMEOUT_S)
        assert runner.run([(1,)], 8, TIMEOUT_S).num_tokens == (8,)


def test_a_short_answer_is_no_figure(start: Start) -> None:
    with start("return [max_tokens - 1, max_tokens]") as runner:
        runner.start(TIMEOUT_S)
        with pytest.raises(PeerError, match=r"4 tokens were asked for each of 2 prompts, it gave \[3, 4\]"):
            runner.run([(1,), (2,)], 4, TIMEOUT_S)


def test_one_that_takes_too_long_is_ended(start: Start) -> None:
    """Its late answer would be taken for the next call's."""
    with start("time.sleep(600)") as runner:
        runner.start(TIMEOUT_S)
        with pytest.raises(PeerError, match="no answer within 0 s"):
            runner.run([(1,)], 1, 0.1)
        with pytest.raises(PeerError, match="it ended"):
            runner.run([(1,)], 1, TIMEOUT_S)


def test_nothing_is_left_of_it(start: Start) -> None:
    before = descendants()
    with start(load="subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])") as runner:
        runner.start(TIMEOUT_S)
        assert len(descendants() - before) == 2
    assert descendants() == before


def test_an_environment_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="No such file"):
        RunnerProcess(Contestant("gone", (str(tmp_path / "bin" / "python"),)), tmp_path / "gone.log")
