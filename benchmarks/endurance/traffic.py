"""What a soak asks: requests of several kinds and lengths, some that share a prefix, some that are cancelled, some that are wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.load.lengths import Length
from benchmarks.load.requests import LoadRequest, RandomTokens, RandomWords

Kind = Literal["completions", "chat", "completions_whole", "chat_whole", "grpc", "bad"]
_WEIGHTS: Final[dict[Kind, int]] = {"completions": 24, "chat": 20, "completions_whole": 14, "chat_whole": 12, "grpc": 25, "bad": 5}
_TEXT_KINDS: Final = ("chat", "chat_whole")
_PREFIX_SHARE: Final = 0.3
_NUM_PREFIXES: Final = 8
_MAX_PREFIX_LENGTH: Final = 128
_EARLIEST_CANCEL_S, _LATEST_CANCEL_S = 0.002, 8.0


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request. `cancel_after_s` counts from sending; one that is answered before then is answered."""

    kind: Kind
    request: LoadRequest
    cancel_after_s: float | None
    variant: int  # of a bad request: which mistake


@dataclass(frozen=True, slots=True)
class Traffic:
    """The laws of the requests."""

    prompt_length: Length
    output_length: Length
    vocab_size: int
    cancel_share: float  # of the requests that are not wrong, those that get a moment of cancelling
    grpc: bool  # whether there is a gRPC port to ask

    def requests(self, seed: int) -> Iterator[SoakRequest]:
        """Requests without end, the same for the same seed."""
        rng = random.Random(f"soak {seed}")
        tokens = RandomTokens(self.prompt_length, self.output_length, self.vocab_size)
        words = RandomWords(self.prompt_length, self.output_length)
        sources = {"tokens": tokens.requests(seed), "words": words.requests(seed)}
        prefixes = {name: _prefixes(source) for name, source in (("tokens", tokens.requests(-1)), ("words", words.requests(-1)))}
        weights = {kind: weight for kind, weight in _WEIGHTS.items() if self.grpc or kind != "grpc"}
        while True:
            (kind,) = rng.choices(list(weights), list(weights.values()))
            name = "words" if kind in _TEXT_KINDS else "tokens"
            request = next(sources[name])
            if rng.random() < _PREFIX_SHARE:
                request = _joined(rng.choice(prefixes[name]), request)
            cancelled = rng.random() < self.cancel_share and kind != "bad"
            yield SoakRequest(kind, request, _cancel_after_s(rng) if cancelled else None, rng.getrandbits(16))


def _prefixes(source: Iterator[LoadRequest]) -> list[LoadRequest]:
    """Beginnings that some prompts have in common, as system prompts are."""
    return [next(source) for _ in range(_NUM_PREFIXES)]


def _joined(prefix: LoadRequest, request: LoadRequest) -> LoadRequest:
    if isinstance(prefix.prompt, str):
        words = [*prefix.prompt.split()[:_MAX_PREFIX_LENGTH], str(request.prompt)]
        return LoadRequest(" ".join(words), request.max_tokens)
    return LoadRequest((*prefix.prompt[:_MAX_PREFIX_LENGTH], *request.prompt), request.max_tokens)


def _cancel_after_s(rng: random.Random) -> float:
    """Log-uniform, so that every stage has its share of cancels: parsing and the queue take milliseconds, decode seconds."""
    return math.exp(rng.uniform(math.log(_EARLIEST_CANCEL_S), math.log(_LATEST_CANCEL_S)))
