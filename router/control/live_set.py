"""All placements that have not ended, by request id. The load of a worker is derived from this set, never counted up and down.

A placement is entered when the router answers an admit (or from a gateway's heartbeat, after a restart of the router) and ends, once
and by any of these, whichever comes first:

    finish      the gateway says so, on every exit path of its request
    replaced    the same request is admitted again
    worker      the worker that its present phase needs has another incarnation, or is gone
    gateway     its gateway is silent for too long, or alive and no longer lists it
    orphaned    none of its workers holds it any more, and its gateway misses heartbeats

Phase `prefill` claims on both workers; phase `decode` on the decode worker alone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from cluster.types import AdmitRequest, Placement, WorkerAddress
from router.control.messages import Phase

_MAX_FINISHED: Final = 4096


@dataclass(frozen=True, slots=True)
class LivePlacement:
    """One entry. `entered_at_s` is the router's clock."""

    request: AdmitRequest
    placement: Placement
    phase: Phase
    entered_at_s: float

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def incarnations(self) -> tuple[str, ...]:
        """The workers that the present phase needs, and has claims on."""
        decode = self.placement.decode.incarnation
        if self.phase is Phase.PREFILL and self.placement.prefill is not None:
            return (self.placement.prefill.incarnation, decode)
        return (decode,)


class LiveSet:
    """The entries, with an index by worker."""

    def __init__(self) -> None:
        self._live: dict[str, LivePlacement] = {}
        self._on: defaultdict[str, dict[str, LivePlacement]] = defaultdict(dict)
        self._tuples: dict[str, tuple[LivePlacement, ...]] = {}  # of `_on`, until it changes
        self._finished: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LivePlacement]:
        return iter(tuple(self._live.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def get(self, request_id: str) -> LivePlacement | None:
        return self._live.get(request_id)

    def on(self, incarnation: str) -> tuple[LivePlacement, ...]:
        """The entries with a claim on this worker; the same object until they change."""
        if incarnation not in self._on:
            return ()
        if incarnation not in self._tuples:
            self._tuples[incarnation] = tuple(self._on[incarnation].values())
        return self._tuples[incarnation]

    def num_by_phase(self) -> dict[str, int]:
        counts = {phase.value: 0 for phase in Phase}
        for live in self._live.values():
            counts[live.phase] += 1
        return counts

    def enter(self, live: LivePlacement) -> None:
        """Adds a placement, in the place of the request's former one if it has one."""
        self._take(live.request_id)
        self._finished.pop(live.request_id, None)
        self._put(live)

    def reenter(self, live: LivePlacement) -> None:
        """Adds what a gateway says is live, unless it is here, or has finished and the heartbeat was the slower message."""
        if self.is_unknown(live.request_id):
            self._put(live)

    def is_unknown(self, request_id: str) -> bool:
        """Neither live nor finished lately."""
        return request_id not in self._live and request_id not in self._finished

    def prefill_done(self, request_id: str) -> None:
        """Ends the claim on the prefill worker. Idempotent; unknown ids are fine."""
        live = self._take(request_id)
        if live is not None:
            self._put(replace(live, phase=Phase.DECODE))

    def redirect(self, request_id: str, decode: WorkerAddress, router_epoch: int) -> Placement:
        """Moves the claim on the decode worker to another."""
        live = self._take(request_id)
        assert live is not None, f"{request_id} is redirected but not live"
        placement = replace(live.placement, decode=decode, router_epoch=router_epoch)
        self._put(replace(live, placement=placement))
        return placement

    def finish(self, request_id: str) -> None:
        """Ends a placement for good: a late heartbeat cannot bring it back. Idempotent."""
        self._finished[request_id] = None
        while len(self._finished) > _MAX_FINISHED:
            self._finished.popitem(last=False)
        self._take(request_id)

    def end(self, request_id: str) -> LivePlacement | None:
        """Ends a placement for a reason of the router's own. Idempotent."""
        return self._take(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError when the index is not what the entries say."""
        expected: dict[str, dict[str, LivePlacement]] = {}
        for live in self._live.values():
            for incarnation in live.incarnations:
                expected.setdefault(incarnation, {})[live.request_id] = live
        assert dict(self._on) == expected, "the index by worker differs from the live set"
        for incarnation, placed in self._tuples.items():
            assert placed == tuple(expected[incarnation].values()), "a kept tuple is out of date"

    def _put(self, live: LivePlacement) -> None:
        self._live[live.request_id] = live
        for incarnation in live.incarnations:
            self._on[incarnation][live.request_id] = live
            self._tuples.pop(incarnation, None)

    def _take(self, request_id: str) -> LivePlacement | None:
        live = self._live.pop(request_id, None)
        for incarnation in live.incarnations if live is not None else ():
            del self._on[incarnation][request_id]
            self._tuples.pop(incarnation, None)
            if not self._on[incarnation]:
                del self._on[incarnation]
        return live
