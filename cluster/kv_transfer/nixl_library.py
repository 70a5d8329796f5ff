"""NIXL, if this machine has it: the import, the environment that UCX reads at its start, and agents that do not spin."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import logging.config
import os
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


def is_installed() -> bool:
    """Whether one of its packages is there; whether it can be loaded is seen by `load`."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def load(host: str) -> Any:
    """NIXL's `_api` module. Takes seconds the first time; what it sets for UCX counts until the process ends.

    Args:
        host: the worker binds to it. A loopback address keeps UCX on the loopback device too: its ports know no secret.

    Raises:
        PlaneUnavailable: it is not installed, or its libraries cannot be loaded.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_loopback(host):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    reasons = []
    for package in _PACKAGES:
        try:
            return _import_quietly(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise PlaneUnavailable(f"NIXL cannot be imported: {'; '.join(reasons)}")


def make_agent(api: Any, name: str, *, progress: bool) -> Any:
    """An agent with the UCX backend.

    Args:
        api: what `load` returned.
        name: by which peers know it.
        progress: whether a thread answers peers' requests. Without one, nothing happens outside of our own calls.

    Raises:
        PlaneUnavailable: UCX does not start here.
    """
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
