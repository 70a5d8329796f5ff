"""What a failed start says, and what is found out before one."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from cluster.errors import ConfigError
from deploy.config_file import load_serve_file
from deploy.local_cluster import LocalCluster, StartFailed, check_ports_free, last_line
from deploy.progress import Progress
from tests.conftest import free_port
from tests.deploy.test_config_file import LOCAL

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


def test_a_ray_that_does_not_come_up_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_options: object) -> None:
        raise TimeoutError("the raylet did not register in time")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("deploy.local_cluster.adopt_orphans", lambda: None)
    cluster = LocalCluster(load_serve_file(LOCAL), Progress())
    with pytest.raises(StartFailed, match=r"^Ray did not start: the raylet did not register in time$"):
        cluster.start_ray()


def test_one_machine_has_the_resources_of_every_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {}
    monkeypatch.setattr("ray.init", lambda **options: said.update(options))
    monkeypatch.setattr("deploy.local_cluster.adopt_orphans", lambda: None)
    pools = ["prefill.resources={fast: 0.5, any: 1}", "prefill.replicas=3", "decode.resources={any: 2}"]
    LocalCluster(load_serve_file(LOCAL, pools), Progress()).start_ray()
    assert said["resources"] == {"fast": 2.0, "any": 5.0}


def test_a_port_in_use_is_refused_by_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy, free = taken.getsockname()[1], free_port()
        with pytest.raises(ConfigError, match=rf"^http_options.port: {busy} on .* --port") as http:
            check_ports_free(load_serve_file(LOCAL, ["gateway.grpc_port=null"], port=busy))
        with pytest.raises(ConfigError, match=rf"^gateway.grpc_port: {busy} on .* --set gateway.grpc_port=") as grpc:
            check_ports_free(load_serve_file(LOCAL, [f"gateway.grpc_port={busy}"], port=free))
        assert (http.value.param, grpc.value.param) == ("http_options.port", "gateway.grpc_port")
    check_ports_free(load_serve_file(LOCAL, [f"gateway.grpc_port={busy}"], port=free))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_one_port_for_both_protocols_is_refused_before_anything_starts(host: str) -> None:
    port = free_port()
    settings = [f"gateway.grpc_port={port}", f"gateway.grpc_host={host}"]
    with pytest.raises(ConfigError, match=rf"^gateway.grpc_port: {port} is http_options.port too"):
        check_ports_free(load_serve_file(LOCAL, settings, port=port))
    check_ports_free(load_serve_file(LOCAL, [f"gateway.grpc_port={port}", "gateway.grpc_host=127.0.0.2"], port=port))
