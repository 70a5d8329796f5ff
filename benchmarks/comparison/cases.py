"""What a library call is asked: prompts of random token ids, all of one length, and so many tokens of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from benchmarks.load.lengths import Fixed
from benchmarks.load.requests import RandomTokens

VOCAB_SIZE: Final = 32_000  # ids are drawn below it, as those of `baton bench`


@dataclass(frozen=True, slots=True)
class Case:
    """All prompts at once, in one call."""

    name: str
    num_prompts: int
    num_prompt_tokens: int
    num_output_tokens: int

    def prompts(self, seed: int) -> list[tuple[int, ...]]:
        """The same token ids as the load generator's for this seed: what a library is called with is what a server is asked."""
        source = RandomTokens(Fixed(self.num_prompt_tokens), Fixed(self.num_output_tokens), VOCAB_SIZE)
        return [tuple(request.prompt) for request in islice(source.requests(seed), self.num_prompts) if isinstance(request.prompt, tuple)]

    @property
    def num_counted(self) -> int:
        """Tokens whose rate is the figure: those of the answers, or of the prompts where an answer is one token."""
        return self.num_prompts * (self.num_prompt_tokens if self.num_output_tokens == 1 else self.num_output_tokens)

    def __str__(self) -> str:
        return f"{self.name}: {self.num_prompts} of ({self.num_prompt_tokens} in, {self.num_output_tokens} out)"


ENGINE_CASES: Final[Mapping[str, Case]] = {
    case.name: case
    for case in (
        Case("decode-1", 1, 16, 128),
        Case("decode-8", 8, 16, 128),
        Case("decode-32", 32, 16, 128),
        Case("prefill-8x512", 8, 512, 1),
        Case("prefill-1x1024", 1, 1024, 1),
    )
}
MIXED: Final = Case("mixed", 16, 512, 64)
