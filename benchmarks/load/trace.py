"""One request of a run, and the latencies that follow from it.

TTFT is from sending to the first chunk with text, end-to-end to the finish reason, TPOT = (end-to-end - TTFT) / (tokens - 1), as in
`vllm bench serve`. Several tokens may arrive at once, in one chunk or in chunks of one read: then the gap before k tokens counts as k ITLs
of gap / k, and tokens that came with the first one as ITLs of 0. So there is one ITL for each token but the first, and they sum to
last chunk - first chunk.
How many tokens a chunk holds is what the protocol says, or the usage's count dealt out by the chunks' lengths (`deal_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

INTERRUPTED: Final = "interrupted"  # the error kind of what was open when the load generator was stopped


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived at once. `num_tokens` is None where the protocol does not say it."""

    arrived_s: float
    num_chars: int
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Trace:
    """One request, answered or failed. Times are seconds after the start of the run."""

    scheduled_s: float
    sent_s: float
    ended_s: float  # the finish reason; of a failed request, the failure
    chunks: tuple[Chunk, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # by the server's usage; by its chunks where it sends none
    error_kind: str | None = None
    error: str = ""

    @property
    def answered(self) -> bool:
        return self.error_kind is None

    @property
    def ended_by_server(self) -> bool:
        """False: it was open when the load generator was stopped, and says nothing of the server."""
        return self.error_kind != INTERRUPTED

    @property
    def lag_s(self) -> float:
        """How late it was sent."""
        return self.sent_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float:
        """An answer without text has its first token when it ends."""
        return (self.chunks[0].arrived_s if self.chunks else self.ended_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks, however many tokens they hold."""
        return [later.arrived_s - earlier.arrived_s for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def itls_s(self) -> list[float]:
        """One for each token but the first."""
        arrivals: dict[float, int] = {}  # tokens by the moment they were read
        for chunk, num_tokens in zip(self.chunks, deal_tokens(self.chunks, self.num_output_tokens), strict=True):
            if num_tokens:
                arrivals[chunk.arrived_s] = arrivals.get(chunk.arrived_s, 0) + num_tokens
        itls: list[float] = []
        previous_s: float | None = None
        for arrived_s, num_tokens in arrivals.items():
            itls += [0.0] * (num_tokens - 1) if previous_s is None else [(arrived_s - previous_s) / num_tokens] * num_tokens
            previous_s = arrived_s
        return itls


def deal_tokens(chunks: Sequence[Chunk], num_tokens: int) -> list[int]:
    """How many of `num_tokens` each chunk holds: one each, and the others in proportion to the chunks' lengths.

    Where the protocol counts each chunk, those counts; where there are fewer tokens than chunks (text held back and split), one each.
    """
    counted = [chunk.num_tokens for chunk in chunks if chunk.num_tokens is not None]
    if len(counted) == len(chunks):
        return counted
    num_left = max(0, num_tokens - len(chunks))
    weights = [chunk.num_chars for chunk in chunks]
    if not any(weights):
        weights = [1] * len(chunks)
    total, seen, given = sum(weights), 0, 0
    dealt = []
    for weight in weights:
        seen += weight
        upto = round(num_left * seen / total)
        dealt.append(1 + upto - given)
        given = upto
    return dealt
