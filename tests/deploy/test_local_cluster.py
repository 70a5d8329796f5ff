"""What a failed start says."""

from __future__ import annotations

import pytest

from deploy.local_cluster import last_line

RETRYING = """A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "worker.py", line 3, in __init__
cluster.errors.ConfigError: decode.kv_cache_bytes: 8 GiB do not fit beside the weights
"""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (RETRYING, "ConfigError: decode.kv_cache_bytes: 8 GiB do not fit beside the weights"),
        (
            RETRYING + "\nThe above exception was the direct cause\n",
            "ConfigError: decode.kv_cache_bytes: 8 GiB do not fit beside the weights",
        ),
        ("ModuleNotFoundError: No module named 'x'", "ModuleNotFoundError: No module named 'x'"),
        ("Deployment was killed.", "Deployment was killed."),
        ("", "unknown cause"),
    ],
)
def test_the_cause_is_the_last_error(message: str, said: str) -> None:
    assert last_line(message) == said
