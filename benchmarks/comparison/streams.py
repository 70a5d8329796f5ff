"""Eight streams that run all the time, and prompts that come and stay away meanwhile: what the reader of a stream sees of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.comparison.cases import VOCAB_SIZE
from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.http import HttpTarget, HttpTransport
from benchmarks.load.lengths import Fixed
from benchmarks.load.requests import LoadRequest, RandomTokens
from benchmarks.load.statistics import percentile
from benchmarks.load.trace import Chunk, Trace
from benchmarks.load.transport import Transport

NUM_STREAMS: Final = 8
_STREAM_TOKENS: Final = (16, 1500)  # in, out; a stream that is answered is followed by another
_PROMPT_TOKENS: Final = (1024, 16)
_SETTLED_CHUNKS: Final = 8  # of each stream before anything is measured
_FIRST_CHUNKS_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.05
_Tasks = Sequence["asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class Interference:
    """Inter-token latencies of the streams without the prompts (before and after them, together as long) and with them."""

    quiet_p50_s: float
    quiet_p99_s: float
    busy_p50_s: float
    busy_p99_s: float
    busy_s: float
    num_prompts: int  # that were answered meanwhile

    @property
    def ratio(self) -> float:
        return self.busy_p99_s / self.quiet_p99_s

    def __str__(self) -> str:
        return f"p99 ITL {self.quiet_p99_s * 1e3:.1f} ms, {self.busy_p99_s * 1e3:.1f} ms with {self.num_prompts} prompts: {self.ratio:.2f}"


async def measure_interference(url: str, duration_s: float, seed: int) -> Interference:
    """Takes twice `duration_s` and some seconds.

    Raises:
        LoadError: a request failed, or the streams do not begin.
    """
    async with HttpTransport(HttpTarget(url)) as transport:
        model = await transport.find_model()
        streams = [_Stream(transport, model, _requests(_STREAM_TOKENS, f"{seed} stream {index}")) for index in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        try:
            return await _measure(streams, tasks, duration_s, lambda: _send_prompts(transport, model, duration_s, seed))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _measure(
    streams: Sequence[_Stream], tasks: _Tasks, duration_s: float, send_prompts: Callable[[], Awaitable[int]]
) -> Interference:
    await _settle(streams, tasks)
    started_s = time.perf_counter()
    await asyncio.sleep(duration_s / 2)
    busy_from_s = time.perf_counter()
    num_prompts = await send_prompts()
    busy_to_s = time.perf_counter()
    await asyncio.sleep(duration_s / 2)
    ended_s = time.perf_counter()
    _raise_failures(tasks)
    answers = [answer for stream in streams for answer in stream.answers]
    quiet = window_itls(answers, started_s, busy_from_s) + window_itls(answers, busy_to_s, ended_s)
    busy = window_itls(answers, busy_from_s, busy_to_s)
    if not quiet or not busy:
        raise LoadError("unfinished", "the streams stood still")
    return Interference(
        quiet_p50_s=percentile(quiet, 0.5),
        quiet_p99_s=percentile(quiet, 0.99),
        busy_p50_s=percentile(busy, 0.5),
        busy_p99_s=percentile(busy, 0.99),
        busy_s=busy_to_s - busy_from_s,
        num_prompts=num_prompts,
    )


async def _settle(streams: Sequence[_Stream], tasks: _Tasks) -> None:
    deadline_s = time.perf_counter() + _FIRST_CHUNKS_TIMEOUT_S
    while any(sum(len(answer.chunks) for answer in stream.answers) < _SETTLED_CHUNKS for stream in streams):
        _raise_failures(tasks)
        if time.perf_counter() > deadline_s:
            raise LoadError("timeout", "the streams do not begin")
        await asyncio.sleep(_POLL_S)


def _raise_failures(tasks: _Tasks) -> None:
    for task in tasks:
        if task.done() and (error := task.exception()):
            raise error


async def _send_prompts(transport: Transport, model: str, duration_s: float, seed: int) -> int:
    """Back to back for `duration_s`; returns when the last one is answered, and with how many were."""
    until_s, num_answered = time.perf_counter() + duration_s, 0
    requests = _requests(_PROMPT_TOKENS, f"{seed} prompts")
    while time.perf_counter() < until_s:
        await transport.send(next(requests), model, Answer(0.0))
        num_answered += 1
    return num_answered


class _Stream:
    """One reader, who asks again when an answer is whole."""

    def __init__(self, transport: Transport, model: str, requests: Iterator[LoadRequest]) -> None:
        self.answers: list[Answer] = []
        self._transport, self._model, self._requests = transport, model, requests

    async def run(self) -> None:
        """Until it is cancelled."""
        for request in self._requests:
            self.answers.append(Answer(0.0))
            await self._transport.send(request, self._model, self.answers[-1])


def window_itls(answers: Iterable[Answer], from_s: float, to_s: float) -> list[float]:
    """Between tokens that both came in this time, as `Trace.itls_s` has them."""
    windows = [_window(answer.chunks, from_s, to_s) for answer in answers]
    return [itl_s for chunks in windows for itl_s in Trace(from_s, from_s, to_s, chunks, num_output_tokens=len(chunks)).itls_s]


def _window(chunks: Sequence[Chunk], from_s: float, to_s: float) -> tuple[Chunk, ...]:
    return tuple(chunk for chunk in chunks if from_s <= chunk.arrived_s < to_s)


def _requests(tokens: tuple[int, int], seed: str) -> Iterator[LoadRequest]:
    source = RandomTokens(Fixed(tokens[0]), Fixed(tokens[1]), VOCAB_SIZE)
    return source.requests(int.from_bytes(seed.encode(), "big"))
