"""Who takes part as a library: the peers that are asked for, and one worker's engine of Baton in each scheme."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.comparison.catalog import PEERS, peers_folder
from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.install import is_installed
from benchmarks.comparison.model_forms import model_for
from benchmarks.comparison.runner_process import Contestant, RunnerProcess
from benchmarks.report import progress

START_TIMEOUT_S: Final = 600.0  # vLLM compiles its model when it starts


@dataclass(slots=True)
class Loaded:
    """Those that came up with their settings, and why the others did not."""

    runners: dict[str, RunnerProcess] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Of everyone who is called as a library."""

    folder: Path  # of the model, as Baton serves it
    threads: int
    dtype: str  # of peers that compute in one of our choice
    config: Path  # whose decode pool has all other settings of Baton's engine


@contextmanager
def loaded(peers: Sequence[str], schemes: Sequence[str], settings: LibrarySettings) -> Iterator[Loaded]:
    """All at once, so that calls can alternate; whoever is not called waits for input. Every process is gone afterwards.

    Args:
        peers: names of the catalog.
        schemes: of Baton's engine, one contestant each, called `baton int8` and the like.
    """
    found = Loaded()
    with ExitStack() as stack:
        for scheme in schemes:
            _load(found, stack, f"baton {scheme}", partial(_baton, scheme=scheme, settings=settings))
        for peer in peers:
            _load(found, stack, peer, partial(_peer, settings=settings))
        yield found


def _load(found: Loaded, stack: ExitStack, name: str, make: Callable[[str], Contestant]) -> None:
    progress(f"loading {name}")
    try:
        runner = stack.enter_context(RunnerProcess(make(name), peers_folder() / "logs" / f"{name.replace(' ', '-')}.log"))
        found.settings[name] = runner.start(START_TIMEOUT_S)
        found.runners[name] = runner
    except PeerError as error:
        progress(f"{name}: {error}")
        found.errors[name] = str(error)


def _baton(name: str, scheme: str, settings: LibrarySettings) -> Contestant:
    module, threads = "benchmarks.comparison.runners.baton", str(settings.threads)
    command = (sys.executable, "-m", module, str(settings.folder), threads, scheme, str(settings.config.resolve()))
    return Contestant(name, command, {"OMP_NUM_THREADS": threads})


def _peer(name: str, settings: LibrarySettings) -> Contestant:
    peer, threads = PEERS[name], settings.threads
    if not is_installed(peer):
        raise PeerError(f"not installed; python -m benchmarks.peers --install {peer.name}")
    command = [str(peer.python), "-m", peer.runner, str(model_for(peer, settings.folder)), str(threads)]
    environment: Mapping[str, str] = {"OMP_NUM_THREADS": str(threads), **peer.environment(threads)}
    return Contestant(peer.name, (*command, *([settings.dtype] if peer.takes_dtype else [])), environment)
