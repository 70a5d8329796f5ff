"""What tests share: the environment that Ray reads when it is imported, one Ray with Serve for all `cluster` tests, a second process."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from deploy.environment import prepare_environment
from tests.other_process import OtherProcess

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: on few cores its threads only spin against each other
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: processes that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["RAY_AUTH_MODE"] = "disabled"  # the cluster lives as long as this process, on loopback
os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.05"
prepare_environment()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def there() -> Iterator[OtherProcess]:
    """Another process, for what a module's tests start there: loading torch takes seconds."""
    with OtherProcess() as process:
        yield process


@pytest.fixture(scope="session")
def serve_url() -> Iterator[str]:
    """Starts Ray and Serve's HTTP proxy; the proxy's URL. Applications on it choose their own route prefix."""
    import ray
    from ray import serve

    from deploy.process_tree import await_end, descendants

    port, others = free_port(), descendants()
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 * 2**20,
        namespace="serve",
        _node_ip_address="127.0.0.1",
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    roots = descendants() - others  # Ray's processes that start all its others
    yield f"http://127.0.0.1:{port}"
    started = roots.union(*(descendants(root.pid) for root in roots))
    ray.shutdown()
    assert not await_end(started, timeout_s=20), "processes are left"
