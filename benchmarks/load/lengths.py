"""How many tokens a prompt or an answer has: `512`, `uniform:100:1000` or `lognormal:300:0.8:4096`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final, Protocol

FORMS: Final = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:MAX"


class Length(Protocol):
    """One law of lengths, at least 1 each."""

    def draw(self, rng: random.Random) -> int:
        """The next length."""


@dataclass(frozen=True, slots=True)
class Fixed:
    num_tokens: int

    def draw(self, rng: random.Random) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """As lengths of chats are: many short ones and a long tail, cut at `maximum`. `sigma` is of the logarithm."""

    median: int
    sigma: float
    maximum: int

    def draw(self, rng: random.Random) -> int:
        return min(self.maximum, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))


def parse_length(text: str) -> Length:
    """The law that `text` names.

    Raises:
        ValueError: it names none, or its numbers are out of range.
    """
    match text.split(":"):
        case [tokens] if _is_length(tokens):
            return Fixed(int(tokens))
        case ["uniform", low, high] if _is_length(low) and _is_length(high) and int(low) <= int(high):
            return Uniform(int(low), int(high))
        case ["lognormal", median, sigma, maximum] if _is_length(median) and _is_length(maximum) and 0 <= _number(sigma) < math.inf:
            return Lognormal(int(median), float(sigma), int(maximum))
    raise ValueError(f"{text!r} is no length: {FORMS}, each length at least 1")


def _is_length(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
