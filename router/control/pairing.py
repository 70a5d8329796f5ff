"""Which workers may serve a request together, and how long it may be: pure functions of `WorkerLoad`s.

Workers are compared when they meet: blocks of another checkpoint, or that cannot be repacked, are never handed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import ContextTooLong
from cluster.kv_layout import why_no_handover
from cluster.types import AdmitRequest, WorkerLoad, WorkerRole


def mismatch(prefill: WorkerLoad, decode: WorkerLoad) -> str | None:
    """Why blocks cannot pass from the one to the other; None when they can."""
    reason = why_no_handover(prefill.layout, decode.layout)
    if prefill.checkpoint != decode.checkpoint:
        reason = f"checkpoint is {prefill.checkpoint} and {decode.checkpoint}"
    if reason is None:
        return None
    return f"prefill worker {prefill.worker_id} and decode worker {decode.worker_id} cannot be paired: {reason}"


def can_pair(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad]) -> bool:
    """Whether blocks can pass from any of the ones to any of the others."""
    return any(mismatch(prefill, decode) is None for prefill in prefills for decode in decodes)


def unserved_reason(pools: Mapping[WorkerRole, Sequence[WorkerLoad]]) -> str | None:
    """Why no request at all could be placed on these running workers; None when one could."""
    for role, loads in pools.items():
        if not loads:
            return f"no {role} worker is running"
    if WorkerRole.COLOCATED in pools:
        return None
    prefills, decodes = pools[WorkerRole.PREFILL], pools[WorkerRole.DECODE]
    return None if can_pair(prefills, decodes) else mismatch(prefills[0], decodes[0])


@dataclass(frozen=True, slots=True)
class Limits:
    """What every one of some workers can hold; None without workers."""

    max_model_len: int | None  # prompt and output tokens
    max_prompt_len: int | None  # prompt tokens that an empty worker admits

    def check(self, request: AdmitRequest) -> None:
        """Refuses what no waiting could make room for.

        Raises:
            ContextTooLong: beyond the context, or the pool's memory, of a worker.
        """
        num_prompt_tokens, total = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
        if self.max_prompt_len is not None and num_prompt_tokens > self.max_prompt_len:
            raise ContextTooLong(f"the prompt has {num_prompt_tokens} tokens; at most {self.max_prompt_len} can be served", param="prompt")
        if self.max_model_len is not None and total > self.max_model_len:
            raise ContextTooLong(
                f"{num_prompt_tokens} prompt tokens and max_tokens of {request.max_tokens} are {total} tokens; "
                f"at most {self.max_model_len} can be served",
                param="max_tokens",
            )


def limits_of(pools: Mapping[WorkerRole, Sequence[WorkerLoad]]) -> Limits:
    """One effective limit for the whole cluster: a request must fit whichever workers it is given."""
    loads = [load for pool in pools.values() for load in pool]
    return Limits(
        max_model_len=min((_max_tokens(load) for load in loads), default=None),
        max_prompt_len=min((_max_prompt_tokens(load) for load in loads), default=None),
    )


def _max_tokens(load: WorkerLoad) -> int:
    if load.role is WorkerRole.PREFILL:  # holds prompts only
        return load.max_model_len
    return min(load.max_model_len, load.num_blocks * load.block_size)


def _max_prompt_tokens(load: WorkerLoad) -> int:
    admitted = (load.num_blocks - load.num_reserved_blocks) * load.block_size
    if load.role is WorkerRole.PREFILL:
        return min(load.max_model_len - 1, admitted)
    return min(load.max_model_len, admitted) - 1
