"""What fault runs ask: completions of slices of prose, long and short, greedy and seeded. The same seed gives the same questions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

_PROSE: Final = (Path(__file__).parents[3] / "benchmarks/data/prose.txt").read_text()
MODEL: Final = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and how it is to be answered; equal questions have equal answers (promise P0)."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = "shared"

    def uncached(self, rng: random.Random) -> Question:
        """The same, with a prompt that no prefix cache holds."""
        return replace(self, cache_salt=f"{rng.getrandbits(64):x}")


def draw_questions(rng: random.Random, count: int) -> list[Question]:
    """`count` different questions; every other one is seeded, every third goes on past the end of its sequence."""
    return [
        Question(
            prompt=prose(rng, rng.choice((120, 300, 600, 1200))),
            max_tokens=rng.choice((4, 12, 24, 40)),
            temperature=(index % 2) * rng.uniform(0.5, 1.0),
            seed=rng.getrandbits(30),
            ignore_eos=index % 3 == 0,
        )
        for index in range(count)
    ]


def prose(rng: random.Random, num_characters: int) -> str:
    """A slice of prose that begins with a word."""
    start = _PROSE.index(" ", rng.randrange(len(_PROSE) - num_characters - 100))
    return _PROSE[start : start + num_characters].strip()
