"""What a client sees of a handoff: how much later than a decode step its second token comes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.load.trace import Chunk

HEADER: Final = ("wire", "prompt", "overlap", "TTFT", "exposed", "of TTFT", "quartiles", "decode step", "on / off")


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, alone on the cluster."""

    ttft_s: float
    exposed_s: float  # t(second token) - t(first token) - one decode step; below 0 where the step was slower than the median
    step_s: float  # the median time of a decode step

    @classmethod
    def of(cls, sent_s: float, chunks: Sequence[Chunk]) -> Seen:
        """Of the messages of an answer, each with its number of tokens.

        Raises:
            ValueError: there are fewer than two steps after the second token, or tokens came with the first one.
        """
        told = [chunk for chunk in chunks if chunk.num_tokens]
        if len(told) < 4 or told[0].num_tokens != 1:
            raise ValueError("an answer must have a first token by itself, a second, and two messages more")
        first, second, *later = told
        previous = [second, *later[:-1]]
        step_s = statistics.median(
            (after.arrived_s - before.arrived_s) / (after.num_tokens or 1) for before, after in zip(previous, later, strict=True)
        )
        num_steps = second.num_tokens or 1
        return cls(first.arrived_s - sent_s, second.arrived_s - first.arrived_s - num_steps * step_s, step_s)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Requests with prompts of one length over one wire, with and without overlap in turns."""

    wire: str
    num_prompt_tokens: int
    on: tuple[Seen, ...]
    off: tuple[Seen, ...]

    @property
    def ratio(self) -> float | None:
        """Of the medians, with overlap over without; None where nothing is exposed without."""
        off_s = _median(self.off, lambda seen: seen.exposed_s)
        return _median(self.on, lambda seen: seen.exposed_s) / off_s if off_s > 0 else None

    def rows(self) -> list[list[str]]:
        """Two, of the table with `HEADER`."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return [self._row("on", self.on, ratio), self._row("off", self.off, "")]

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        head = {"wire": self.wire, "num_prompt_tokens": self.num_prompt_tokens, "ratio": self.ratio}
        return {**head, "on": _record(self.on), "off": _record(self.off)}

    def _row(self, overlap: str, seen: Sequence[Seen], ratio: str) -> list[str]:
        exposed = sorted(one.exposed_s for one in seen)
        quartiles = statistics.quantiles(exposed, n=4) if len(exposed) > 1 else [exposed[0]] * 3
        return [
            self.wire,
            str(self.num_prompt_tokens),
            overlap,
            f"{_median(seen, lambda one: one.ttft_s) * 1e3:.0f} ms",
            f"{statistics.median(exposed) * 1e3:.2f} ms",
            f"{_share(seen):.2%}",
            f"{quartiles[0] * 1e3:.2f} to {quartiles[2] * 1e3:.2f} ms",
            f"{_median(seen, lambda one: one.step_s) * 1e3:.2f} ms",
            ratio,
        ]


def _record(seen: Sequence[Seen]) -> dict[str, Any]:
    medians = {name: round(_median(seen, lambda one, name=name: getattr(one, name)), 6) for name in ("ttft_s", "exposed_s", "step_s")}  # type: ignore[misc]
    return {**medians, "exposed_of_ttft": round(_share(seen), 5), "requests": [asdict(one) for one in seen]}


def _share(seen: Sequence[Seen]) -> float:
    return _median(seen, lambda one: one.exposed_s / one.ttft_s)


def _median(seen: Sequence[Seen], of: Callable[[Seen], float]) -> float:
    return statistics.median(map(of, seen))
