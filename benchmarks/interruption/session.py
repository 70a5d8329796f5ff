"""The runs, in turn: one with the stop, then its control, which goes on until every stream is as long as it was when the stop ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.interruption.comparison import Pair, Sample, control_spread
from benchmarks.interruption.load import Load, until_reached
from benchmarks.interruption.memory_watch import MemoryWatch
from benchmarks.interruption.stop import Stop
from benchmarks.interruption.timed_stream import TimedStream
from benchmarks.report import progress

_SLOWEST: Final = 3.0  # a control that takes so many times as long as its run with the stop is cut off


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long each part of a run with a stop takes, and how many such runs there are, each with its control."""

    stop_s: float = 20.0
    lead_s: float = 3.0  # all streams run, before the stop
    watch_s: float = 10.0  # after it
    rest_s: float = 2.0  # between runs: what was cancelled goes
    num_pairs: int = 2


async def measure(target: str, pid: int, num_streams: int, schedule: Schedule) -> dict[str, Any]:
    """Loads the gRPC API at `target` and stops the process `pid` in every other run.

    Raises:
        ProcessLookupError: there is no process `pid`.
        TimeoutError: a stream does not begin.
        EndedEarly: a stream was answered in full before the stop was over, or failed without one.
    """
    load = await Load.of(target, num_streams)
    memory = MemoryWatch(pid)
    pairs = []
    for index in range(schedule.num_pairs):
        progress(f"pair {index + 1} of {schedule.num_pairs}")
        pairs.append(await _pair(load, memory, pid, schedule))
    return {
        "process": memory.names[pid],
        "stop_s": schedule.stop_s,
        "streams": num_streams,
        **Sample.joined(pair.sample() for pair in pairs).figures(),
        "control_spread": control_spread(pairs),
        "pairs": [pair.figures() for pair in pairs],
        "grown_bytes": memory.grown_bytes(),
        "processes_ended": memory.ended,
    }


async def _pair(load: Load, memory: MemoryWatch, pid: int, schedule: Schedule) -> Pair:
    started_s = time.monotonic()
    async with load.running() as streams, memory.watching():
        await asyncio.sleep(schedule.lead_s)
        stop = await Stop.of(pid, schedule.stop_s)
        lasted_s = time.monotonic() - started_s
        await asyncio.sleep(schedule.watch_s)
    stop.check(streams)
    await asyncio.sleep(schedule.rest_s)
    progress("the same without a stop")
    async with load.running() as control:
        await until_reached(control, [_tokens_by(stop, stream) for stream in streams], _SLOWEST * lasted_s)
    await asyncio.sleep(schedule.rest_s)
    return Pair(stop, streams, control)


def _tokens_by(stop: Stop, stream: TimedStream) -> int:
    """How many the control needs of this stream: as many as went on to the end of the stop."""
    if stop.goes_through(stream):
        return 0
    return max((gap.positions.stop for gap in stream.gaps() if stop.overlaps(gap)), default=0)
