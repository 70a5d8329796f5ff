"""Real workers in processes of their own, which faults may kill. One process has torch loaded and forks the others off.

python -m tests.integration.worker_host     # reads one JSON object a line, answers with one line: pid, address, incarnation
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cluster.config import TransferConfig
from cluster.faults.rules import FaultInjectionConfig
from tests.harness import Workers
from tests.integration.faults.processes import lives


@dataclass(frozen=True, slots=True)
class HostedWorker:
    """A worker as the harness's client addresses it."""

    pid: int
    endpoint: Any  # has `address`
    gate: Any  # has `incarnation`

    async def await_end(self) -> None:
        """Returns when its process is gone."""
        async with asyncio.timeout(10):
            while lives(self.pid):  # noqa: ASYNC110  # no child of this process
                await asyncio.sleep(0.02)


class WorkerHost:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.integration.worker_host"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, role: str, folder: Path, rules: list[dict[str, Any]]) -> HostedWorker:
        """A worker of the pool `role`, of the model in `folder`, with checksums and these faults; blocks until it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"role": role, "folder": str(folder), "rules": rules}), file=self._process.stdin, flush=True)
        pid, address, incarnation = self._process.stdout.readline().split()
        return HostedWorker(int(pid), SimpleNamespace(address=address), SimpleNamespace(incarnation=incarnation))

    def close(self) -> None:
        """Ends all of them."""
        self._process.communicate(timeout=10)


async def _work(role: str, folder: str, rules: list[dict[str, Any]]) -> None:
    faults = FaultInjectionConfig.model_validate({"rules": rules})
    async with Workers(Path(folder), transfer=TransferConfig(checksums=True), faults=faults) as workers:
        worker = await (workers.start_prefill() if role == "prefill" else workers.start_decode())
        print(os.getpid(), worker.endpoint.address, worker.gate.incarnation, flush=True)
        await asyncio.Event().wait()


def _main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    children = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(_work(**json.loads(line)))
        children.append(pid)
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _main()
