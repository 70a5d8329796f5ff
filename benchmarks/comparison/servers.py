"""Servers that take part: a Baton, as `baton serve` starts it, in some setting; and vLLM's CPU build. One runs at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.comparison.catalog import PEERS, peers_folder
from benchmarks.comparison.failure import PeerError, last_words
from benchmarks.comparison.install import is_installed
from benchmarks.comparison.model_forms import model_for
from benchmarks.comparison.runner_process import ROOT
from benchmarks.endurance.target import StartFailed, started
from benchmarks.report import progress
from deploy.openai_client import OpenAIServer, ServerError
from deploy.process_tree import await_end, descendants

START_TIMEOUT_S: Final = 600.0  # vLLM compiles its model when it starts
_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.5
_END_TIMEOUT_S: Final = 20.0

Start = Callable[[], AbstractContextManager[str]]  # gives the URL; every process is gone afterwards


@dataclass(frozen=True, slots=True)
class Cluster:
    """A setting of Baton: what it changes in the config file."""

    name: str
    overrides: tuple[str, ...]


# On two cores: a thread for each pool's one worker, or both for the one that does all.
DISAGGREGATED: Final = Cluster("disaggregated 1+1", ("mode=disaggregated", "prefill.threads=1", "decode.threads=1"))
COLOCATED: Final = Cluster("colocated 2", ("mode=colocated", "decode.threads=2", "decode.kv_cache_bytes=1GiB"))


def parse_cluster(text: str) -> Cluster:
    """Of `NAME:KEY=VALUE,…`.

    Raises:
        ValueError: it has another form.
    """
    name, colon, overrides = text.partition(":")
    pairs = tuple(part for part in overrides.split(",") if part)
    if not name or not colon or any("=" not in pair for pair in pairs):
        raise ValueError(f"{text!r}: expected NAME:KEY=VALUE,…")
    return Cluster(name, pairs)


def baton(cluster: Cluster, config: Path, model: str, port: int) -> Start:
    """HTTP on `port`, gRPC on the next."""

    @contextmanager
    def start() -> Iterator[str]:
        progress(f"starting baton {cluster.name}")
        try:
            with started(config, [f"model={model}", *cluster.overrides], port, port + 1) as target:
                yield target.url
        except StartFailed as error:
            raise PeerError(f"it did not start: {last_words(str(error))}") from error

    return start


def vllm(folder: Path, threads: int, dtype: str, port: int) -> Start:
    """`vllm serve` of the model in `folder`, a folder that Baton serves."""

    @contextmanager
    def start() -> Iterator[str]:
        peer = PEERS["vllm"]
        if not is_installed(peer):
            raise PeerError("not installed; python -m benchmarks.peers --install vllm")
        command = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_for(peer, folder))]
        command += ["--served-model-name", folder.name, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
        environment = {name: value for name, value in peer.environment(threads).items() if "MULTIPROCESSING" not in name}
        progress("starting vllm serve (minutes)")
        with _served(command, environment, f"http://127.0.0.1:{port}", peers_folder() / "logs" / "vllm-serve.log") as url:
            yield url

    return start


@contextmanager
def _served(command: Sequence[str], environment: Mapping[str, str], url: str, log: Path) -> Iterator[str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_health(process, url, log)
        yield url
    finally:
        _end(process)


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    server, deadline_s = OpenAIServer(url, _ANSWER_TIMEOUT_S), time.monotonic() + START_TIMEOUT_S
    while True:
        if process.poll() is not None:
            raise PeerError(f"it did not start: {last_words(log.read_text(encoding='utf-8', errors='replace'))}")
        try:
            server.first_model()
            return
        except ServerError as error:
            if time.monotonic() > deadline_s:
                raise PeerError(f"it did not serve within {START_TIMEOUT_S:.0f} s: {error}") from error
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for orphan in await_end(below, timeout_s=5.0):
        orphan.kill()
