"""The rule that bounded host memory cannot bring a pool to a halt.

KV is never thrown away, so a pool and its host slots could fill with sequences that all want one more block. Therefore blocks are only
handed out while the sequences could still finish one after another, first in order first: while one runs, all later ones may be out
of the way in the host slots. Whoever would break the rule waits. The first in order never does: it runs to its end, its blocks come
free, and the next is the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """A sequence's hold on blocks (or host slots), and the most it may come to."""

    entries: Sequence[int]
    max_blocks: int
    num_new: int = 0  # blocks it asks for now


def can_all_finish(claims: Sequence[Claim], *, num_blocks: int, num_host_slots: int) -> bool:
    """Whether `claims`, in order, can be served to the end one after another with all moves the slots allow.

    A shared block counts once. With host slots, one place more is needed to exchange a block for another while both are full.
    """
    spare = 1 if num_host_slots else 0
    held: set[int] = set()
    num_new = 0
    for claim in reversed(claims):
        held.update(claim.entries)
        num_new += claim.num_new
        growth = claim.max_blocks - len(claim.entries) - claim.num_new
        if len(held) + num_new + max(growth, spare) > num_blocks + num_host_slots:
            return False
    return True
