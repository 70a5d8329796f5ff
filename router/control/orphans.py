"""Placements of a gateway that died: it is not heard any more, and no worker holds them.

A worker hears at once that a gateway has died, as its connections break, and lists the requests no longer. The router hears of it here,
long before the gateway counts as silent, so that nothing queues behind claims of nobody. Neither sign is enough alone: a report may lack
a request whose first step is still running, or whose client is slow to read what the workers are done with; and a gateway may only be slow.
"""

from __future__ import annotations

from typing import Final

from router.control.gateways import GatewayWatch
from router.control.live_set import LivePlacement, LiveSet
from router.control.workers import WorkerRegistry

ORPHAN_AFTER_S: Final = 2.0  # far more than a live gateway needs from one worker to the next
_GATEWAY_QUIET_S: Final = 2.5  # two heartbeats missed
_INTERVAL_S: Final = 0.5


class OrphanWatch:
    """When each placement was last held by one of its workers, as far as their reports tell."""

    def __init__(self, live: LiveSet, registry: WorkerRegistry, gateways: GatewayWatch) -> None:
        self._live = live
        self._registry = registry
        self._gateways = gateways
        self._held_at_s: dict[str, float] = {}
        self._looked_at_s = 0.0

    def found(self, now_s: float) -> list[LivePlacement]:
        """The placements that became orphans since the last call."""
        if now_s - self._looked_at_s < _INTERVAL_S:
            return []
        self._looked_at_s = now_s
        known = self._held_at_s
        self._held_at_s = {live.request_id: self._last_held_s(live, known.get(live.request_id, 0.0), now_s) for live in self._live}
        return [live for live in self._live if self._is_orphan(live, self._held_at_s[live.request_id], now_s)]

    def _last_held_s(self, live: LivePlacement, known_s: float, now_s: float) -> float:
        workers = [self._registry.get(incarnation) for incarnation in live.incarnations]
        if any(worker is not None and live.request_id in worker.live_ids for worker in workers):
            return now_s
        return max(known_s, live.entered_at_s)

    def _is_orphan(self, live: LivePlacement, held_at_s: float, now_s: float) -> bool:
        """Its gateway is quiet, and all its workers have reported long after they last held it: one that is silent may hold it still."""
        if not self._gateways.is_quiet(live.request.gateway_id, now_s, _GATEWAY_QUIET_S):
            return False
        workers = [self._registry.get(incarnation) for incarnation in live.incarnations]
        return all(worker is not None and worker.heard_at_s - held_at_s > ORPHAN_AFTER_S for worker in workers)
