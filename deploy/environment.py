"""What Ray reads from the environment, once, when it is imported: so this comes first, and imports no ray."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent
# Ray's own metrics and records of tasks, which nothing here reads: Baton's `/metrics` is its own, and there is no dashboard. Each export
# runs in a thread of its own, in every process, and takes one of malloc's arenas in turn, until all hold what an export needs.
_RAY_TELLS_NOTHING: Final = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
# Ray preloads jemalloc into its own processes (never into workers), where each of dozens of threads keeps a cache of what it freed: the
# raylet comes to hold 18 MiB for 0.2 MiB of data. Without caches they are flat, and 2 to 8 MiB smaller each. The list of processes is
# meant for profiles; it says whose jemalloc reads the options, and agents have them from the raylet.
_RAY_HOARDS_NOTHING: Final = {
    "RAY_JEMALLOC_CONF": "narenas:1,tcache:false,dirty_decay_ms:0,muzzy_decay_ms:0",
    "RAY_JEMALLOC_PROFILE": "gcs_server,raylet,monitor,log_monitor,dashboard",
}
# Else each token crosses from one thread's event loop to another's, in the gateway and in the proxy: on few cores, time that workers lack.
# Nothing of ours blocks a loop. (Serve's gRPC in place of Ray's objects would take less still, but grpc.aio keeps some memory of each
# request whose client leaves.)
_SERVE_HAS_ONE_LOOP: Final = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
_DEFAULTS: Final = {
    **_SERVE_HAS_ONE_LOOP,
    **_RAY_TELLS_NOTHING,
    **_RAY_HOARDS_NOTHING,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "router.gateway.failover:middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # Serve replaces a dead proxy after three failed checks; its own period is 10 s
}


def prepare_environment() -> None:
    """Sets up this process and those it starts for a Ray of their own. Values that the user has set stay."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:  # a secret of this start alone; Ray itself would leave one in the home folder
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))  # for the processes that import `deploy.app`
