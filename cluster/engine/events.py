"""What an engine says about a sequence while it steps.

Order for one sequence: `Allocated`, `Computed`*, `Token`*; the last `Token` has a finish reason. `Failed` ends it instead when the
engine itself broke. Times are `time.monotonic()` of the worker's process.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.kv_ticket import BlockRef
from cluster.types import FinishReason, TokenOutput


@dataclass(frozen=True, slots=True)
class Allocated:
    """The sequence got blocks for its whole prompt; `num_cached_tokens` of it were already computed for another."""

    blocks: tuple[BlockRef, ...]
    num_cached_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The KV of the first `num_computed_tokens` prompt tokens is final."""

    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, and when the step that made it began."""

    output: TokenOutput
    finish_reason: FinishReason | None
    step_started_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on with the sequence."""

    message: str


EngineEvent = Allocated | Computed | Token | Failed
