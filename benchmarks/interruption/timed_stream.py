"""One answer over gRPC, and when its tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from grpc import aio

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub

_OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two messages; times are `time.monotonic()`. `positions` are the tokens that ended it, counted from the answer's first."""

    started_s: float
    ended_s: float
    positions: range

    @property
    def length_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def itl_s(self) -> float:
        """Of each of its tokens: those that come together share the gap before them."""
        return self.length_s / len(self.positions)


@dataclass
class TimedStream:
    """`arrivals` are (when, tokens so far), one a message with tokens."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    failure: str | None = None
    finish: str | None = None  # the reason, of an answer that is whole
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # or over

    @property
    def num_tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    async def run(self, target: str, request: pb.GenerateRequest) -> None:
        """Reads until it fails or is cancelled."""
        async with aio.insecure_channel(target, options=_OWN_CONNECTION) as channel:
            stub: Any = InferenceStub(channel)
            try:
                async for message in stub.Generate(request):
                    self._take(message, time.monotonic())
            except aio.AioRpcError as error:
                self.failure = error.code().name
            finally:
                self.begun.set()

    def _take(self, message: pb.GenerateResponse, now_s: float) -> None:
        if message.tokens:
            self.arrivals.append((now_s, self.num_tokens + len(message.tokens)))
            self.begun.set()
        if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self.finish = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()

    def gaps(self) -> Iterator[Gap]:
        """In order."""
        for (started_s, num_before), (ended_s, num_after) in pairwise(self.arrivals):
            yield Gap(started_s, ended_s, range(num_before, num_after))

    def has_tokens(self, start_s: float, end_s: float) -> bool:
        """Whether some came in this time."""
        return any(start_s <= at_s < end_s for at_s, _ in self.arrivals)
