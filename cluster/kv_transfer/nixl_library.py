"""NIXL, if this machine has it: the import, the environment that UCX reads at its start, and agents that do not spin."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import logging.config
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final

from cluster.errors import PlaneUnavailable
from cluster.kv_transfer.loopback import is_loopback

BACKEND: Final = "UCX"

_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")  # the meta package, then the wheels it stands for; none needs a GPU
_ENVIRONMENT: Final = {
    "UCX_LOG_LEVEL": "error",  # it warns, a line for each block, of transfers that were given up
    "UCX_HANDLE_ERRORS": "none",  # no signal handlers of its own: faulthandler and Ray have theirs
}
# How long the progress thread sleeps when no file descriptor wakes it. Its default of 0 takes a whole core.
_PROGRESS_INTERVAL_US: Final = 10_000
_MAKING: Final = Lock()  # the environment is the whole process's


def is_installed() -> bool:
    """Whether one of its packages is there; whether it can be loaded is seen by `make_agent`."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def make_agent(name: str, host: str, *, progress: bool) -> Any:
    """An agent with the UCX backend. Takes seconds the first time.

    Args:
        name: by which peers know it.
        host: the worker binds to it. A loopback address keeps UCX on the loopback device too: its ports know no secret.
        progress: whether a thread answers peers' requests. Without one, nothing happens outside of our own calls.

    Raises:
        PlaneUnavailable: NIXL is not installed or cannot be loaded, or UCX does not start here.
    """
    with _MAKING, _environment(host):
        api = _load()
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread = progress
        config.pthrDelay = _PROGRESS_INTERVAL_US
        try:
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
            agent.agent = api.nixlBind.nixlAgent(name, config)  # the interval is not among nixl_agent_config's settings
            agent.create_backend(BACKEND)
        except Exception as error:  # one class for each status, without a common base
            raise PlaneUnavailable(f"NIXL's {BACKEND} backend does not start: {error}") from error
    return agent


@contextmanager
def _environment(host: str) -> Iterator[None]:
    """What UCX reads when it is loaded and when an agent is made, where the user has set nothing. It is taken back at the end: processes
    that this one starts later may be bound to another host."""
    wanted = {**_ENVIRONMENT, **({"UCX_NET_DEVICES": "lo"} if is_loopback(host) else {})}
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _load() -> Any:
    reasons = []
    for package in _PACKAGES:
        try:
            return _import_quietly(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise PlaneUnavailable(f"NIXL cannot be imported: {'; '.join(reasons)}")


def _import_quietly(module: str) -> Any:
    # The import configures the logging of the whole process, which closes everybody's handlers, and prints to stdout.
    configure, raise_exceptions = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda _: None  # type: ignore[assignment]
    try:
        api = importlib.import_module(module)
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raise_exceptions
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return api
