"""What `baton serve` asks of Ray by the environment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.endurance.roles import role_of
from deploy.environment import prepare_environment
from deploy.process_tree import descendants

METRICS = "RAY_enable_metrics_collection"
TASK_EVENTS = "RAY_task_events_report_interval_ms"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METRICS, "1")
    monkeypatch.delenv(TASK_EVENTS)
    prepare_environment()
    assert (os.environ[METRICS], os.environ[TASK_EVENTS]) == ("1", "0")


@pytest.mark.cluster
@pytest.mark.usefixtures("serve_url")
def test_ray_collects_no_metrics_and_keeps_no_record_of_tasks() -> None:
    """Ray ignores a name that it does not know: this asks what came of them."""
    import ray

    assert ray.get(ray.remote(num_cpus=0)(lambda: 1).remote()) == 1
    time.sleep(2.0)  # twice the interval at which workers would report their tasks
    assert ray.timeline() == []
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    (port,) = session.glob("metrics_export_port_*")
    assert port.read_text() == "-1"


def test_serve_runs_all_of_a_process_on_one_loop() -> None:
    from ray.serve._private import constants

    assert (constants.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, constants.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP) == (False, False)


@pytest.mark.cluster
@pytest.mark.usefixtures("serve_url")
def test_rays_own_processes_run_without_caches_and_workers_without_jemalloc() -> None:
    import ray

    (raylet,) = [process for process in descendants(os.getpid()) if role_of(process.pid) == "raylet"]
    assert "tcache:false" in environment_of(raylet.pid)["MALLOC_CONF"]
    assert "libjemalloc" in Path(f"/proc/{raylet.pid}/maps").read_text(encoding="utf-8")
    worker_maps: str = ray.get(ray.remote(num_cpus=0)(lambda: Path("/proc/self/maps").read_text(encoding="utf-8")).remote())
    assert "libjemalloc" not in worker_maps


def environment_of(pid: int) -> dict[str, str]:
    """What the process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
