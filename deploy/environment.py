"""What Ray reads from the environment, once, when it is imported: so this comes first, and imports no ray."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent


def prepare_environment() -> None:
    """Sets up this process and those it starts for a Ray of their own. Values that the user has set stay."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "2")  # how late Serve sees that its HTTP proxy died; its own: 10
    if "RAY_AUTH_MODE" not in os.environ:  # a secret of this start alone; Ray itself would leave one in the home folder
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))  # for the processes that import `deploy.app`
