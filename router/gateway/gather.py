"""One question to every process of the cluster, by deployment. Whatever happens to one of them, the others are heard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

Source = Callable[[], Awaitable[Sequence[T | BaseException]]]  # the answers of a deployment's replicas, an exception for one that failed


@dataclass(frozen=True, slots=True)
class Gathered(Generic[T]):
    """What one deployment said."""

    answers: tuple[T, ...]
    failures: tuple[str, ...]  # why a replica, or the deployment as a whole, did not answer


async def gather(sources: Mapping[str, Source[T]], timeout_s: float) -> dict[str, Gathered[T]]:
    """Asks all deployments at once; each has `timeout_s`."""
    found = await asyncio.gather(*(_ask(source, timeout_s) for source in sources.values()))
    return dict(zip(sources, found, strict=True))


async def _ask(source: Source[T], timeout_s: float) -> Gathered[T]:
    try:
        async with asyncio.timeout(timeout_s):
            said = await source()
    except Exception as error:
        return Gathered((), (_text(error),))
    answers = tuple(answer for answer in said if not isinstance(answer, BaseException))
    return Gathered(answers, tuple(_text(answer) for answer in said if isinstance(answer, BaseException)))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__  # Ray's texts alone may say little
