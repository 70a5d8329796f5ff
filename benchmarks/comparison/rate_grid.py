"""Finds the highest rate of a grid that attains, in few runs: each is minutes long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RateGrid:
    """Steps are whole numbers from 1; rates are multiples of the grid's width. It goes up or down by a quarter, then bisects.

    It knows steps and verdicts alone; who measures them calls `next_step` and `tell` in turns.
    """

    first_step: int
    max_probes: int = 16
    num_probes: int = 0
    highest_attained: int = 0  # 0: none
    lowest_missed: int | None = None

    def next_step(self) -> int | None:
        """The step to try now; None when the highest one that attains is known, or after `max_probes`."""
        if self.num_probes >= self.max_probes:
            return None
        if self.highest_attained == 0 and self.lowest_missed is None:
            return self.first_step
        if self.lowest_missed is None:
            return self.highest_attained + max(1, self.highest_attained // 4)
        if self.lowest_missed - self.highest_attained == 1:
            return None
        if self.highest_attained == 0:
            return self.lowest_missed - max(1, self.lowest_missed // 4)
        return (self.highest_attained + self.lowest_missed) // 2

    def tell(self, step: int, attained: bool) -> None:
        """What `step`, which `next_step` gave, turned out to be."""
        self.num_probes += 1
        if attained:
            self.highest_attained = step
        else:
            self.lowest_missed = step
