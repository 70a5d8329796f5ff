"""Processes are told apart by their command lines, as Ray and Baton write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.endurance.roles import is_replica, role_of, role_of_command


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:baton:Prefill" + " " * 40, "Prefill"),
        ("ray::ServeReplica:baton:Gateway.handle_request_with_rejection", "Gateway"),
        ("ray::ServeController", "ServeController"),
        ("ray::ProxyActor", "ProxyActor"),
        ("ray::IDLE", "IDLE"),
        ("/x/ray/core/src/ray/gcs/gcs_server\0--log_dir=/x/monitor.py", "gcs_server"),
        ("/x/ray/core/src/ray/raylet/raylet\0--python_worker_command=/x/python", "raylet"),
        ("/x/bin/python\0-u\0/x/ray/autoscaler/_private/monitor.py\0--logs-dir=/x", "autoscaler monitor"),
        ("/x/bin/python\0/x/ray/dashboard/dashboard.py\0--host=127.0.0.1", "dashboard"),
        ("/x/bin/python\0-u\0/x/ray/_private/log_monitor.py\0--session-dir=/x", "log monitor"),
        ("/x/bin/python\0-m\0deploy.cli\0serve", "baton serve"),
        ("/x/bin/python\0-m\0benchmarks.soak", "benchmarks.soak"),
        ("", ""),
    ],
)
def test_names(command: str, role: str) -> None:
    assert role_of_command(command.split("\0")) == role


def test_this_process_has_a_role_and_is_no_replica() -> None:
    assert role_of(os.getpid())
    assert not is_replica(os.getpid())


def test_a_kernel_thread_has_its_kernel_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"")
    assert role_of(os.getpid()) == Path("/proc/self/comm").read_text().strip()
