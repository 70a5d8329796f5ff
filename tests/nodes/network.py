"""A network of this machine alone: a bridge, and a cable from it to each node's own network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from typing import Final, Self

_TOOLS: Final = ("ip", "unshare", "nsenter", "mount")
_BRIDGE_MAC: Final = "02:00:00:00:00:01"  # locally administered; no two bridges are in one network


def why_impossible() -> str | None:
    """Why nodes of their own cannot be made here; None if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)}"
    script = "mount -t tmpfs tmpfs /dev/shm && ip link add b0 type bridge && ip link add v0 type veth peer name v1"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    return None if tried.returncode == 0 else f"this user or kernel makes no namespaces: {tried.stderr.strip()}"


class Network:
    """Addresses are of the range for benchmarks (RFC 2544), with a part of our process's number, so that two runs do not meet."""

    def __init__(self) -> None:
        self._bridge = f"bt{os.getpid()}"
        self._prefix = f"198.18.{os.getpid() % 254}"
        # With an address of its own: else it has the least of its cables', and another one without that cable, which the nodes' ARP
        # caches would hear of too late: a stream from a node to us stalled until its keepalive ended it.
        ip("link", "add", self._bridge, "address", _BRIDGE_MAC, "type", "bridge")
        try:
            ip("addr", "add", f"{self.address(1)}/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, number: int) -> str:
        """Of node `number`, from 2 on; 1 is ours."""
        return f"{self._prefix}.{number}"

    def plug(self, number: int, pid: int) -> None:
        """Lays a cable from the bridge to the namespace of the process `pid`, in which it is `eth0`."""
        ip("link", "add", self._cable(number), "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", self._cable(number), "master", self._bridge, "up")

    def unplug(self, number: int) -> None:
        """From now on nothing comes from the node, not even that its connections have ended. Idempotent."""
        with suppress(subprocess.CalledProcessError):  # it goes with the node
            ip("link", "del", self._cable(number))

    def close(self) -> None:
        """Takes the bridge away."""
        ip("link", "del", self._bridge)

    def _cable(self, number: int) -> str:
        return f"{self._bridge}-{number}"


def ip(*arguments: str) -> None:
    """The command of that name."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
