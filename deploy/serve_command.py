"""`baton serve`: from a config file to answers, and back to a machine without a trace of it.

Everything that can be checked without Ray is checked first. SIGINT, SIGTERM and SIGHUP end the start, or the serving, and drain; a
second one kills.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deploy.calibration import calibrate_cached
from deploy.config_file import ServeFile, load_serve_file
from deploy.first_prompt import PROMPT, FirstAnswer, ask, await_ready, curl_line
from deploy.kernel_build import build_kernels
from deploy.local_cluster import LocalCluster, StartFailed, check_ports_free
from deploy.preflight import check_memory, check_model, pools
from deploy.progress import Progress
from deploy.pull import resolve_model

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(path: Path, overrides: Sequence[str] = (), port: int | None = None) -> int:
    """Serves until a signal; returns the exit code.

    Raises:
        ConfigError: before anything was started.
    """
    progress = Progress()
    file = load_serve_file(path, overrides, port)
    check_ports_free(file)
    check_memory(file.config)
    folder = resolve_model(file.config.model, progress.step)
    check_model(file.config, folder)
    calibrate_cached(folder, progress.step)
    progress.step(f"model: {folder}")
    if file.config.fault_injection.rules:
        progress.step(str(file.config.fault_injection))
    build_kernels(file.config, progress)
    return _run(LocalCluster(file, progress))


def _run(cluster: LocalCluster) -> int:
    _on_signal(signal.default_int_handler)
    try:
        _start(cluster)
        cluster.watch()  # until a signal
    except StartFailed as failure:
        cluster.progress.step(f"failed: {failure}")
        if cluster.log_folder is not None:
            cluster.progress.line(f"    logs: {cluster.log_folder}")
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        _on_signal(lambda _number, _frame: _force(cluster))
        cluster.progress.step(f"stopping: running requests have {_drain_s(cluster.file):g} s (again: at once)")
        cluster.stop()
        cluster.progress.step("stopped")
    return 0


def _start(cluster: LocalCluster) -> None:
    progress, file = cluster.progress, cluster.file
    progress.step("starting Ray")
    cluster.start_ray()
    _on_signal(signal.default_int_handler)  # instead of Ray's
    progress.step("starting Serve")
    cluster.start_serve()
    progress.step(f"deploying {file.application}")
    cluster.deploy()
    cluster.await_running()
    await_ready(file.url)
    progress.step("ready; asking: " + PROMPT)
    _show(progress, file, ask(file.url))


def _show(progress: Progress, file: ServeFile, answer: FirstAnswer) -> None:
    progress.line(f"\n    {answer.text.strip()}\n")
    for name, value in answer.rows():
        progress.line(f"    {name:<14} {value:>10}")
    gateway = file.config.gateway
    grpc = "" if gateway.grpc_port is None else f", gRPC at {gateway.grpc_host}:{gateway.grpc_port}"
    progress.line(f"\nServing {answer.model} at {file.url}/v1{grpc} (Ctrl-C stops). Try:\n\n{curl_line(file.url, answer)}\n")


def _drain_s(file: ServeFile) -> float:
    return max(pool.drain_timeout_s for _, pool in pools(file.config))


def _on_signal(handler: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)  # type: ignore[arg-type]


def _force(cluster: LocalCluster) -> None:
    cluster.kill()
    os._exit(130)
