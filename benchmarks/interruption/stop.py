"""When a process stood still, and which streams that stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.interruption.timed_stream import Gap, TimedStream
from benchmarks.report import progress

_ON_ITS_WAY_S: Final = 1.0  # what had left the process before it stopped still arrives


class EndedEarly(Exception):
    """Streams were over before a run could tell anything of them."""


@dataclass(frozen=True)
class Stop:
    """Times are `time.monotonic()`."""

    started_s: float
    ended_s: float

    @classmethod
    async def of(cls, pid: int, lasts_s: float) -> Stop:
        """Stops the process `pid` for so long.

        Raises:
            ProcessLookupError: there is none.
        """
        started_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            progress(f"{pid} is stopped")
            await asyncio.sleep(lasts_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        return cls(started_s, time.monotonic())

    def goes_through(self, stream: TimedStream) -> bool:
        """Whether it stopped this stream. One that only pauses goes on, however late: its pause is a gap like any other."""
        return not stream.has_tokens(self.started_s + _ON_ITS_WAY_S, self.ended_s)

    def overlaps(self, gap: Gap) -> bool:
        return gap.ended_s > self.started_s and gap.started_s < self.ended_s

    def check(self, streams: Sequence[TimedStream]) -> None:
        """
        Raises:
            EndedEarly: a stream was answered in full before the stop was over, so it tells neither.
        """
        early = [stream for stream in streams if stream.finish is not None and stream.arrivals[-1][0] < self.ended_s]
        if early:
            counts = Counter(f"{stream.num_tokens} tokens, {stream.finish}" for stream in early)
            ends = "; ".join(f"{text} ({count})" if count > 1 else text for text, count in counts.items())
            raise EndedEarly(
                f"{len(early)} of {len(streams)} streams were answered before the stop was over; ask for a shorter one: {ends}"
            )
