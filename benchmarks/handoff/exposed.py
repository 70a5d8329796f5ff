"""Two Batons side by side, one with overlap and one without, asked in turns by one client: how late the second token comes.

The one that is not asked idles. Prompts are new each time, so all of their KV is computed and travels.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.endurance.target import started
from benchmarks.handoff.exposed_figures import Exposed, Seen
from benchmarks.handoff.wire import Wire
from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.grpc import GrpcTarget, GrpcTransport
from benchmarks.load.requests import LoadRequest
from benchmarks.report import progress

OVERLAPS: Final = (True, False)
VOCAB_SIZE: Final = 32_000
_FIRST_TOKEN_ID: Final = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of each pair of Batons."""

    config: Path
    overrides: tuple[str, ...]
    port: int  # of the first one's HTTP; the three that follow are used too
    lengths: tuple[int, ...]  # prompt tokens
    output_tokens: int
    num_rounds: int
    seed: int


def measure(plan: Plan, wire: Wire) -> list[Exposed]:
    """One for each length.

    Raises:
        StartFailed: a Baton did not come up.
        LoadError: a request failed, or its answer has too few tokens.
    """
    wire.prepare_process()  # of the workers, whose environment is ours
    with ExitStack() as stack:
        targets: dict[bool, str] = {}
        for index, overlap in enumerate(OVERLAPS):
            progress(f"{wire.name}: starting Baton with overlap {_word(overlap)}")
            settings = [f"kv_transfer.planes=[{wire.plane}]", f"kv_transfer.overlap={str(overlap).lower()}", *plan.overrides]
            port = plan.port + 2 * index
            grpc_target = stack.enter_context(started(plan.config, settings, port, port + 1)).grpc_target
            assert grpc_target is not None
            targets[overlap] = grpc_target
        found = asyncio.run(ask(plan, wire.name, targets))
    return [Exposed(wire.name, length, *(tuple(found[length, overlap]) for overlap in OVERLAPS)) for length in plan.lengths]


async def ask(plan: Plan, name: str, targets: Mapping[bool, str]) -> dict[tuple[int, bool], list[Seen]]:
    """What is seen of requests to `targets` (host:port, with overlap and without), by length and overlap; `name` is for the progress.

    Raises:
        LoadError: as `measure`.
    """
    found: dict[tuple[int, bool], list[Seen]] = defaultdict(list)
    prompts = _prompts(plan.seed, max(plan.lengths))
    async with AsyncExitStack() as stack:
        transports = {overlap: await stack.enter_async_context(GrpcTransport(GrpcTarget(target))) for overlap, target in targets.items()}
        model = await transports[True].find_model()
        for number in range(plan.num_rounds + 1):  # the first is the warm-up
            progress(f"{name}: round {number} of {plan.num_rounds}")
            for length, overlap in itertools.product(plan.lengths, turned(OVERLAPS, number)):
                request = LoadRequest(next(prompts)[:length], plan.output_tokens)
                seen = await _send(transports[overlap], request, model)
                if number:
                    found[length, overlap].append(seen)
    return found


def turned(settings: Sequence[bool], number: int) -> Sequence[bool]:
    """The order of a round: each goes first in every other one."""
    return settings if number % 2 else settings[::-1]


async def _send(transport: GrpcTransport, request: LoadRequest, model: str) -> Seen:
    answer = Answer(started_s=0.0)
    sent_s = time.perf_counter()
    await transport.send(request, model, answer)
    try:
        return Seen.of(sent_s, answer.chunks)
    except ValueError as error:
        raise LoadError("malformed", str(error)) from error


def _prompts(seed: int, length: int) -> Iterator[tuple[int, ...]]:
    """Without end, each new; of the greatest length."""
    rng = random.Random(f"transfer {seed}")
    while True:
        yield tuple(rng.choices(range(_FIRST_TOKEN_ID, VOCAB_SIZE), k=length))


def _word(overlap: bool) -> str:
    return "on" if overlap else "off"
