"""What one measurement runs: decode steps of a batch, or whole prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Steps of `batch` sequences with `context` tokens of KV each at the first of them. A sample is one step."""

    batch: int
    context: int

    @property
    def num_tokens(self) -> int:
        """Computed by one sample."""
        return self.batch

    def num_held_tokens(self, num_samples: int) -> list[int]:
        """KV that each sequence holds in the end."""
        return [self.context + num_samples] * self.batch

    def __str__(self) -> str:
        return f"decode, batch {self.batch}, context {self.context}"


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Prompts of `num_tokens`, one after the other. A sample is one prompt, in as many steps as it takes, up to its first token."""

    num_tokens: int

    def num_held_tokens(self, num_samples: int) -> list[int]:
        """KV that each sequence holds in the end; prompts follow one another, whatever `num_samples`."""
        return [self.num_tokens]

    def __str__(self) -> str:
        return f"prefill, {self.num_tokens} tokens"


Case = DecodeCase | PrefillCase


def make_cases(batches: Iterable[int], contexts: Iterable[int], prompts: Iterable[int]) -> list[Case]:
    """Every batch with every context, then the prompts."""
    contexts = list(contexts)
    return [*(DecodeCase(batch, context) for context in contexts for batch in batches), *map(PrefillCase, prompts)]
