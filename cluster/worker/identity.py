"""Who a worker is. A restarted worker is another one: it has another incarnation, even at the same address."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cluster.types import WorkerRole


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One life of a worker."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    node_id: str

    @classmethod
    def draw(cls, worker_id: str, role: WorkerRole, node_id: str) -> WorkerIdentity:
        """A new life of `worker_id`."""
        return cls(worker_id, secrets.token_hex(8), role, node_id)
