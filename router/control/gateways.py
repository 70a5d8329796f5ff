"""When each gateway was last heard of. Its placements end when it is silent for too long: nobody reads their tokens any more."""

from __future__ import annotations


class GatewayWatch:
    """Gateways by id (one life each)."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_at_s: dict[str, float] = {}

    def heard(self, gateway_id: str, now_s: float) -> None:
        self._heard_at_s[gateway_id] = now_s

    def is_quiet(self, gateway_id: str, now_s: float, quiet_s: float) -> bool:
        """Not heard for `quiet_s`, or not at all."""
        heard_at_s = self._heard_at_s.get(gateway_id)
        return heard_at_s is None or now_s - heard_at_s > quiet_s

    def take_silent(self, now_s: float) -> frozenset[str]:
        """The gateways that have just timed out; they are forgotten until they are heard again."""
        silent = frozenset(name for name, at_s in self._heard_at_s.items() if now_s - at_s > self._timeout_s)
        for name in silent:
            del self._heard_at_s[name]
        return silent
