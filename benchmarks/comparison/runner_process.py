"""The process of one contestant that is called as a library: loads once, then answers cases, each within a time limit."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.comparison.failure import PeerError, last_words
from deploy.process_tree import descendants

ROOT: Final = Path(__file__).resolve().parent.parent.parent
_READ_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is started, and as whom its figures appear."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of the library."""

    duration_s: float
    num_tokens: tuple[int, ...]  # output tokens of each prompt


class RunnerProcess:
    """`start`, `run` as often as wanted, `stop` from any point. What the process prints goes to `log`."""

    def __init__(self, contestant: Contestant, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._buffer = b""
        with log.open("wb") as stderr:
            try:
                self._process = subprocess.Popen(
                    contestant.command,
                    cwd=ROOT,
                    env={**os.environ, "HF_HUB_OFFLINE": "1", **contestant.environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends that one
                    bufsize=0,
                )
            except OSError as error:
                raise PeerError(f"{contestant.command[0]}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float) -> dict[str, Any]:
        """Waits until the model is loaded; the settings that the runner says.

        Raises:
            PeerError: it could not be loaded, or not in time.
        """
        settings: dict[str, Any] = self._receive(timeout_s)["ready"]
        return settings

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float) -> Sample:
        """One call.

        Raises:
            PeerError: it failed, took too long, or gave another number of tokens than asked for. One that takes too long is ended.
        """
        line = json.dumps({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except OSError as error:
            raise PeerError(f"it ended: {self._last_words()}") from error
        answer = self._receive(timeout_s)
        sample = Sample(answer["duration_s"], tuple(answer["num_tokens"]))
        if sample.num_tokens != (max_tokens,) * len(prompts):
            raise PeerError(f"{max_tokens} tokens were asked for each of {len(prompts)} prompts, it gave {sorted(set(sample.num_tokens))}")
        return sample

    def stop(self) -> None:
        """Ends it and what it started, at once: it may be in the middle of a call, and has nothing to keep."""
        below = descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        for orphan in below:
            orphan.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                self._process.kill()  # its answer would come to the next call
                raise PeerError(f"no answer within {timeout_s:.0f} s")
            received = os.read(descriptor, _READ_BYTES)
            if not received:
                raise PeerError(f"it ended: {self._last_words()}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise PeerError(message["error"])
        return message

    def _last_words(self) -> str:
        return last_words(self._log.read_text(encoding="utf-8", errors="replace"))
