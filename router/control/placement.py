"""Where a request goes: pure functions of the workers' views, the same for the same input.

Prefill is compute-bound, so its load is the tokens still to compute; decode is bound by memory, so its load is the fuller of its
blocks and its sequences. Between equals, the worker that has done less goes first, so that an idle cluster spreads its work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.types import AdmitRequest, WorkerLoad, WorkerRole
from router.control.claims import WorkerView
from router.control.credits import has_credit
from router.control.pairing import can_pair, mismatch

Pools = Mapping[WorkerRole, Sequence[WorkerView]]  # the running workers of each pool of the cluster
Rank = tuple[float, float, int, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers for a request; `prefill` is None where one worker does both."""

    decode: WorkerLoad
    prefill: WorkerLoad | None = None


class PlacementPolicy(Protocol):
    """Decides on values alone: no clock, no state."""

    def choose(self, pools: Pools, request: AdmitRequest) -> Choice | None:
        """Workers with credit for the request; None while there are none."""

    def choose_decode(
        self, pools: Pools, request: AdmitRequest, prefill: WorkerLoad | None, avoid: Collection[str], *, need_credit: bool
    ) -> WorkerLoad | None:
        """Another decode worker for KV that `prefill` holds; incarnations in `avoid` are left out."""

    def is_eligible(self, pools: Pools, request: AdmitRequest) -> bool:
        """Whether the request could be placed here if all credits were free."""


class LeastLoaded:
    """The worker of each pool with the least ahead of it, among those that have credit and did not fail this request before."""

    def __init__(self, max_prefill_ahead: float) -> None:
        self._max_prefill_ahead = max_prefill_ahead

    def choose(self, pools: Pools, request: AdmitRequest) -> Choice | None:
        if WorkerRole.COLOCATED in pools:
            worker = next(self._with_credit(sorted(pools[WorkerRole.COLOCATED], key=_prefill_load), request), None)
            return None if worker is None else Choice(worker)
        tried: set[tuple[object, ...]] = set()
        for prefill in self._with_credit(sorted(pools[WorkerRole.PREFILL], key=_prefill_load), request):
            kind = (prefill.checkpoint, prefill.layout)  # what pairs with one pairs with all of its kind
            if kind not in tried:
                tried.add(kind)
                decode = self.choose_decode(pools, request, prefill, (), need_credit=True)
                if decode is not None:
                    return Choice(decode, prefill)
        return None

    def choose_decode(
        self, pools: Pools, request: AdmitRequest, prefill: WorkerLoad | None, avoid: Collection[str], *, need_credit: bool
    ) -> WorkerLoad | None:
        role = WorkerRole.COLOCATED if WorkerRole.COLOCATED in pools else WorkerRole.DECODE
        views = sorted(pools[role], key=_decode_load)
        loads = self._with_credit(views, request) if need_credit else (view.load for view in views)
        left = (load for load in loads if load.incarnation not in avoid)
        return next((load for load in left if prefill is None or mismatch(prefill, load) is None), None)

    def is_eligible(self, pools: Pools, request: AdmitRequest) -> bool:
        left = {role: [v.load for v in views if v.load.incarnation not in request.exclude] for role, views in pools.items()}
        if WorkerRole.COLOCATED in pools:
            return bool(left[WorkerRole.COLOCATED])
        return can_pair(left[WorkerRole.PREFILL], left[WorkerRole.DECODE])

    def _with_credit(self, views: Iterable[WorkerView], request: AdmitRequest) -> Iterator[WorkerLoad]:
        for view in views:
            if view.load.incarnation not in request.exclude and has_credit(view, request, self._max_prefill_ahead):
                yield view.load


def _prefill_load(view: WorkerView) -> Rank:
    return (view.num_tokens_ahead, view.num_blocks_used, view.load.num_tokens_total, view.load.worker_id)


def _decode_load(view: WorkerView) -> Rank:
    load = view.load
    fullness = max(view.num_blocks_used / max(view.num_blocks_usable, 1), view.num_seqs / load.max_num_seqs)
    return (fullness, view.num_seqs, load.num_tokens_total, load.worker_id)
