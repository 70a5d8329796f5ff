"""Whether the cluster can place requests: the recovery after the router's start, and pools without a worker."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.types import WorkerLoad, WorkerRole
from router.control.messages import Ready
from router.control.pairing import unserved_reason
from router.control.workers import WorkerRegistry


class Readiness:
    """Told by the router of each moment that matters; holds when requests could last be placed."""

    def __init__(
        self, registry: WorkerRegistry, expected: Mapping[WorkerRole, int], *, recovery_s: float, capacity_wait_s: float, now_s: float
    ) -> None:
        self._registry = registry
        self._expected = dict(expected)
        self._recovered_at_s = now_s + recovery_s
        self._is_recovered = False
        self._capacity_wait_s = capacity_wait_s
        self._served_s = now_s

    def is_recovering(self, now_s: float) -> bool:
        """Whether some expected worker, perhaps full of work, may not have reported yet."""
        if not self._is_recovered:
            all_reported = all(self._registry.num_reported(role) >= count for role, count in self._expected.items())
            self._is_recovered = all_reported or now_s >= self._recovered_at_s
        return not self._is_recovered

    def running(self, now_s: float) -> dict[WorkerRole, list[WorkerLoad]]:
        """The workers that take work now, by pool."""
        pools: dict[WorkerRole, list[WorkerLoad]] = {role: [] for role in self._expected}
        for worker in self._registry:
            if worker.load.role in pools and self._registry.takes_work(worker, now_s):
                pools[worker.load.role].append(worker.load)
        return pools

    def no_capacity(self, now_s: float) -> str | None:
        """Why requests should not wait any longer: for `capacity_wait_s` none could have been placed. None while they may."""
        reason = unserved_reason(self.running(now_s))
        if reason is None:
            self._served_s = now_s
            return None
        return reason if now_s - self._served_s >= self._capacity_wait_s else None

    def ready(self, now_s: float) -> Ready:
        """Whether a new request would be placed, credits aside."""
        if self.is_recovering(now_s):
            return Ready(False, "the router waits for the workers' reports")
        reason = unserved_reason(self.running(now_s))
        return Ready(reason is None, reason or "")
