"""What is asked: random prompts of drawn lengths, or the lines of a JSONL file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.load.lengths import Length
from cluster.errors import ConfigError

_FIRST_TOKEN_ID: Final = 256  # the first ids of a vocabulary are often control tokens
_PROSE: Final = Path(__file__).parent.parent / "data" / "prose.txt"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One question: text, or token ids."""

    prompt: str | tuple[int, ...]
    max_tokens: int


class RequestSource(Protocol):
    """Where requests come from."""

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        """Requests without end, the same for the same seed."""

    def warm_up(self, seed: int) -> Iterator[LoadRequest]:
        """Requests without end that are not the first of `requests`, whose prompts a prefix cache would know otherwise."""


def _rng(seed: int) -> random.Random:
    """`random.Random` takes -1 for 1: of a text it does not, and the warm-up of seed 0 has -1."""
    return random.Random(f"prompts {seed}")


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Token ids without a common prefix, so no cache helps."""

    prompt_length: Length
    output_length: Length
    vocab_size: int

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        rng = _rng(seed)
        while True:
            num_tokens = self.prompt_length.draw(rng)
            prompt = tuple(rng.randrange(_FIRST_TOKEN_ID, self.vocab_size) for _ in range(num_tokens))
            yield LoadRequest(prompt, self.output_length.draw(rng))

    def warm_up(self, seed: int) -> Iterator[LoadRequest]:
        return self.requests(seed - 1)


@dataclass(frozen=True, slots=True)
class RandomWords:
    """Text for servers that take no token ids. The length is in words: how many tokens they are, the server's usage says."""

    prompt_length: Length
    output_length: Length

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        rng = _rng(seed)
        words = sorted(set(_PROSE.read_text(encoding="utf-8").split()))
        while True:
            prompt = " ".join(rng.choices(words, k=self.prompt_length.draw(rng)))
            yield LoadRequest(prompt, self.output_length.draw(rng))

    def warm_up(self, seed: int) -> Iterator[LoadRequest]:
        return self.requests(seed - 1)


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """The lines of a file, in its order and over again."""

    recorded: tuple[LoadRequest, ...]

    def requests(self, seed: int) -> Iterator[LoadRequest]:
        return itertools.cycle(self.recorded)

    def warm_up(self, seed: int) -> Iterator[LoadRequest]:
        return itertools.cycle(reversed(self.recorded))


def read_requests(path: Path) -> RecordedRequests:
    """Lines of `{"prompt": text or token ids, "max_tokens": n}`; other keys are let be.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line (named) is not of this form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", param="--dataset") from error
    recorded = tuple(_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip())
    if not recorded:
        raise ConfigError(f"{path} has no requests", param="--dataset")
    return RecordedRequests(recorded)


def _read_line(line: str, place: str) -> LoadRequest:
    try:
        match json.loads(line):
            case {"prompt": str(text), "max_tokens": int(max_tokens)} if text and max_tokens >= 1:
                return LoadRequest(text, max_tokens)
            case {"prompt": [*ids], "max_tokens": int(max_tokens)} if ids and max_tokens >= 1 and _are_token_ids(ids):
                return LoadRequest(tuple(ids), max_tokens)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: no JSON: {error}", param="--dataset") from error
    raise ConfigError(f'{place}: expected {{"prompt": text or token ids, "max_tokens": n >= 1}}', param="--dataset")


def _are_token_ids(ids: list[object]) -> bool:
    return all(type(token) is int and token >= 0 for token in ids)
