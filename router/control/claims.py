"""What the live placements claim of a worker, joined with what the worker itself reports: the load that decisions are made on.

The live set knows what was placed in the last moments, which no report has yet; a report knows what the live set cannot: sequences
that grew, leases, work of requests whose placement has ended. A request is told apart by its id in the report's `live_requests`, so
nothing is counted twice. Blocks and sequences take the larger view, as room that is not there costs a refusal. Prompt tokens take
the smaller: a prompt that the report shows as computed is not ahead any more, though its KV is still to be taken, and a report from
before a prompt ended must not keep its worker idle until the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cluster.types import AdmitRequest, WorkerLoad, WorkerRole
from router.control.live_set import LivePlacement
from router.control.messages import Phase
from router.control.workers import Worker

GROWTH_TOKENS: Final = 64  # room claimed for output at placement; what a sequence grows beyond it, the reports show


@dataclass(frozen=True, slots=True)
class Claim:
    """What one placement takes of one worker."""

    num_tokens: int = 0  # of the prompt, not yet computed
    num_blocks: int = 0
    num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker's load as far as the router can know it now."""

    load: WorkerLoad
    num_tokens_ahead: int  # placed prompt tokens that are not computed yet
    num_blocks_used: int
    num_seqs: int

    @property
    def num_blocks_usable(self) -> int:
        """Blocks that admission may fill."""
        return self.load.num_blocks - self.load.num_reserved_blocks


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def claim_of(request: AdmitRequest, load: WorkerLoad, phase: Phase = Phase.PREFILL) -> Claim:
    """What `request` takes of a worker like `load` in a phase that has a claim on it."""
    if load.role is WorkerRole.PREFILL:
        return Claim(request.num_prompt_tokens, num_blocks_for(request.num_prompt_tokens, load.block_size), 1)
    computes_prompt = load.role is WorkerRole.COLOCATED and phase is Phase.PREFILL
    return Claim(request.num_prompt_tokens if computes_prompt else 0, _decode_blocks(request, load), 1)


def view_of(worker: Worker, placed: Iterable[LivePlacement]) -> WorkerView:
    """Joins a report with the placements that have a claim on the worker. Pure."""
    load = worker.load
    claims = [(live.request_id, claim_of(live.request, load, live.phase)) for live in placed]
    total = _sum(claim for _, claim in claims)
    unreported = _sum(claim for request_id, claim in claims if request_id not in worker.live_ids)
    num_blocks_held = load.num_blocks_owned + load.num_blocks_leased
    num_seqs_held = load.num_seqs_running + load.num_seqs_waiting
    return WorkerView(
        load=load,
        num_tokens_ahead=min(total.num_tokens, load.num_tokens_waiting + unreported.num_tokens),
        num_blocks_used=max(total.num_blocks, num_blocks_held + unreported.num_blocks),
        num_seqs=max(total.num_seqs, num_seqs_held + unreported.num_seqs),
    )


def _sum(claims: Iterable[Claim]) -> Claim:
    num_tokens = num_blocks = num_seqs = 0
    for claim in claims:
        num_tokens += claim.num_tokens
        num_blocks += claim.num_blocks
        num_seqs += claim.num_seqs
    return Claim(num_tokens, num_blocks, num_seqs)


def _decode_blocks(request: AdmitRequest, load: WorkerLoad) -> int:
    """The prompt and some growth; where that is more than the worker could ever have, the prompt and one token, if they fit."""
    wanted = num_blocks_for(request.num_prompt_tokens + min(request.max_tokens, GROWTH_TOKENS), load.block_size)
    least = num_blocks_for(request.num_prompt_tokens + 1, load.block_size)
    return max(least, min(wanted, load.num_blocks - load.num_reserved_blocks))
