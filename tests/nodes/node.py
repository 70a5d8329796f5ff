"""A machine, as far as one kernel can play several: its own network, processes, shared memory and Ray folder. They share the disk."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from tests.nodes.network import Network

ROOT: Final = Path(__file__).resolve().parents[2]
_SETUP: Final = (
    "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo up && exec cat"
)
_END_S: Final = 10.0


class Node:
    """Runs until `kill`, or until the process that made it ends."""

    def __init__(self, network: Network, number: int) -> None:
        """`number` of its address, from 2 on."""
        self.address = network.address(number)
        self._network, self._number = network, number
        namespaces = ("--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
        # Its first process is `cat`, which ends when our end of its stdin closes; all others of the node end with it.
        self._holder = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", _SETUP], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert self._holder.stdout is not None
            assert self._holder.stdout.readline() == b"up\n", "the node did not come up"
            self._first = _child(self._holder.pid)
            network.plug(number, self._first)
            self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
            self.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.kill()
            raise

    def run(self, *command: str) -> None:
        """Runs a command in the node to its end, which must be good."""
        subprocess.run(self._entered(command), check=True, cwd=ROOT, capture_output=True)

    def start(self, *command: str, output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a command in the node, with `environment` beside our own; what it says goes to `output`."""
        settings = {**os.environ, **environment}
        return subprocess.Popen(self._entered(command), cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def unplug(self) -> None:
        """See `Network.unplug`."""
        self._network.unplug(self._number)

    def kill(self) -> None:
        """Ends all its processes by SIGKILL. Idempotent."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()
        self.unplug()

    def _entered(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self._first), "--net", "--mount", "--pid", "--ipc", "--wd", "--", *command]


def _child(pid: int) -> int:
    """The only child of a process."""
    deadline_s = time.monotonic() + _END_S
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline_s, "it started nothing"
        time.sleep(0.01)
    return int(children[0])
