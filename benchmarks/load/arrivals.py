"""When requests are sent in an open loop: seconds after the start, without end, the same for the same seed.

An open loop sends by the clock and not by the answers, as many independent users do: a slow server gets no fewer requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Arrivals(Protocol):
    """One law of arrival."""

    def times_s(self, seed: int) -> Iterator[float]:
        """Send times after the start, in order, without end."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: the gaps are exponential with mean `1 / rate`."""

    rate: float  # requests/s

    def times_s(self, seed: int) -> Iterator[float]:
        rng = random.Random(f"arrivals {seed}")  # other draws than those of the prompts, which have the same seed
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate)
            yield now_s


@dataclass(frozen=True, slots=True)
class Bursts:
    """`size` requests at the same moment; the bursts themselves arrive as Poisson, so that `rate` stays the mean."""

    rate: float  # requests/s
    size: int

    def times_s(self, seed: int) -> Iterator[float]:
        for burst_s in Poisson(self.rate / self.size).times_s(seed):
            for _ in range(self.size):
                yield burst_s
