"""Whether a worker has room for one more request: pure functions of its view.

A prefill credit keeps prompts in the router's queue, where they are in order, until their worker is about to need them, and keeps a
slow decode pool from filling the prefill pool's memory with leases. A decode credit is given before the prompt is computed, so the KV
of a placed request has a place to go.
"""

from __future__ import annotations

from cluster.types import AdmitRequest, WorkerRole
from router.control.claims import WorkerView, claim_of


def has_credit(view: WorkerView, request: AdmitRequest, max_prefill_ahead: float) -> bool:
    """Room for all that `request` would do on this worker."""
    if view.load.role is WorkerRole.DECODE:
        return _has_room(view, request)
    return _has_room(view, request) and _has_budget(view, request, max_prefill_ahead)


def _has_room(view: WorkerView, request: AdmitRequest) -> bool:
    claim = claim_of(request, view.load)
    return view.num_seqs + claim.num_seqs <= view.load.max_num_seqs and view.num_blocks_used + claim.num_blocks <= view.num_blocks_usable


def _has_budget(view: WorkerView, request: AdmitRequest, max_prefill_ahead: float) -> bool:
    """A prompt beyond the whole budget goes to a worker with nothing else ahead."""
    limit = max_prefill_ahead * view.load.max_num_batched_tokens
    return view.num_tokens_ahead == 0 or view.num_tokens_ahead + request.num_prompt_tokens <= limit
