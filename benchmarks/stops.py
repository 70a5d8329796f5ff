"""What a process that stops for a while does to the streams that do not go through it, and to memory, on a Baton that runs already.

python -m benchmarks.stops 127.0.0.1:9000 --pid PID          PID of a gateway, prefill or decode worker, of which there should be two

Streams run over gRPC, each on a connection of its own. The process gets SIGSTOP, and later SIGCONT. Streams that have no token in the
second half of the stop go through it; the inter-token latency of all others is compared with theirs before the stop. A stream that is
answered in full before the stop is over tells neither: such a run is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from grpc import aio

from benchmarks.memory import command_of, resident_bytes
from benchmarks.report import RESULTS, progress, publish, table
from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from deploy.process_tree import descendants

_PROMPT: Final = "Once upon a time, in a lighthouse,"
_FIRST_TOKEN_S: Final = 120.0
_WATCH_S: Final = 0.5
_PROMPT_TOKENS: Final = 64  # more than the prompt has; the answers fill the rest of the context, since they must outlast the stop


class EndedEarly(Exception):
    """Streams were answered in full before the stop was over."""


@dataclass
class TimedStream:
    """One answer, and when its messages came (`time.monotonic()`), each of about one token."""

    arrivals_s: list[float] = field(default_factory=list)
    failure: str | None = None
    finish: str | None = None  # the reason, of an answer that is whole
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, target: str, request: pb.GenerateRequest) -> None:
        """Reads until it fails or is cancelled."""
        async with aio.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            stub: Any = InferenceStub(channel)
            try:
                async for message in stub.Generate(request):
                    self.arrivals_s.append(time.monotonic())
                    self.begun.set()
                    if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                        self.finish = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
            except aio.AioRpcError as error:
                self.failure = error.code().name

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Between messages that both came in this time."""
        inside = [at_s for at_s in self.arrivals_s if start_s <= at_s < end_s]
        return [later - earlier for earlier, later in pairwise(inside)]

    def has_tokens(self, start_s: float, end_s: float) -> bool:
        return any(start_s <= at_s < end_s for at_s in self.arrivals_s)


@dataclass(frozen=True)
class Stop:
    """When it was. The time before is as long."""

    started_s: float
    ended_s: float

    def goes_through(self, stream: TimedStream) -> bool:
        """Whether the stop stops this stream."""
        return not stream.has_tokens((self.started_s + self.ended_s) / 2, self.ended_s)

    def figures(self, streams: Sequence[TimedStream]) -> dict[str, Any]:
        """Medians over all gaps of the streams that go on, in seconds; None where there are none.

        Raises:
            EndedEarly: a stream was answered in full before the stop was over.
        """
        early = [stream for stream in streams if stream.finish is not None and stream.arrivals_s[-1] < self.ended_s]
        if early:
            counts = Counter(f"{len(stream.arrivals_s)} messages, {stream.finish}" for stream in early)
            ends = "; ".join(f"{text} ({count})" if count > 1 else text for text, count in counts.items())
            raise EndedEarly(f"{len(early)} of {len(streams)} streams were answered before the stop was over: {ends}")
        others = [stream for stream in streams if not self.goes_through(stream)]
        stopped = [stream for stream in streams if self.goes_through(stream)]
        lasted_s = self.ended_s - self.started_s
        before = _median([gap for stream in others for gap in stream.gaps_s(self.started_s - lasted_s, self.started_s)])
        during = _median([gap for stream in others for gap in stream.gaps_s(self.started_s, self.ended_s)])
        return {
            "stop_s": round(lasted_s, 1),
            "streams": len(streams),
            "streams_stopped": len(stopped),
            "streams_resumed": sum(stream.has_tokens(self.ended_s, float("inf")) for stream in stopped),
            "failures": sorted(stream.failure for stream in streams if stream.failure is not None),
            "itl_before_s": before,
            "itl_during_s": during,
            "ratio": during / before if before and during else None,
        }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


async def measure(target: str, pid: int, *, num_streams: int, stop_s: float) -> dict[str, Any]:
    """Loads the gRPC API at `target`, stops `pid` for `stop_s`, and watches for as long afterwards.

    Raises:
        ProcessLookupError: there is no process `pid`.
        TimeoutError: a stream does not begin.
        EndedEarly: a stream was answered in full before the stop was over.
    """
    streams = [TimedStream() for _ in range(num_streams)]
    model = await _model(target)
    requests = [_request(model, seed) for seed in range(num_streams)]
    tasks = [asyncio.create_task(stream.run(target, request)) for stream, request in zip(streams, requests, strict=True)]
    try:
        async with asyncio.timeout(_FIRST_TOKEN_S):
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
        progress("all streams run")
        await asyncio.sleep(stop_s)
        memory = _Memory(pid)
        watch = asyncio.create_task(memory.watch())
        stop = await _stopped(pid, stop_s)
        await asyncio.sleep(stop_s)
        watch.cancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"process": memory.names[pid], **stop.figures(streams), "grown_bytes": memory.grown_bytes()}


async def _model(target: str) -> pb.GetModelResponse:
    async with aio.insecure_channel(target) as channel:
        stub: Any = InferenceStub(channel)
        model: pb.GetModelResponse = await stub.GetModel(pb.GetModelRequest(), timeout=10)
        return model


def _request(model: pb.GetModelResponse, seed: int) -> pb.GenerateRequest:
    max_tokens = max(1, model.max_model_len - _PROMPT_TOKENS)
    return pb.GenerateRequest(model=model.name, text=_PROMPT, max_tokens=max_tokens, ignore_eos=True, seed=seed)


async def _stopped(pid: int, stop_s: float) -> Stop:
    started_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        progress(f"{pid} is stopped")
        await asyncio.sleep(stop_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    return Stop(started_s, time.monotonic())


class _Memory:
    """Of a replica and those beside it: its siblings, as Ray starts them."""

    def __init__(self, pid: int) -> None:
        pids = [process.pid for process in descendants(_parent(pid))]
        self.names = {each: command_of(each) for each in pids if command_of(each).startswith(("ray::ServeReplica", "ray::ProxyActor"))}
        self._before = {each: resident_bytes(each) for each in self.names}
        self._peak = dict(self._before)

    async def watch(self) -> None:
        while True:
            self._peak.update({each: max(num_bytes, resident_bytes(each)) for each, num_bytes in self._peak.items()})
            await asyncio.sleep(_WATCH_S)

    def grown_bytes(self) -> dict[str, int]:
        """By title and pid: the peak above what it was before the stop."""
        return {f"{name} {each}": self._peak[each] - self._before[each] for each, name in self.names.items()}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="host:port of the gRPC API")
    parser.add_argument("--pid", type=int, required=True, help="the process to stop")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it stops (default: %(default)s)")
    options = parser.parse_args()
    try:
        found = asyncio.run(measure(options.target, options.pid, num_streams=options.streams, stop_s=options.seconds))
    except EndedEarly as error:
        raise SystemExit(f"{error}; ask for fewer --seconds") from error
    except ProcessLookupError as error:
        raise SystemExit(str(error)) from error
    except aio.AioRpcError as error:
        raise SystemExit(f"{options.target}: {error.code().name}: {error.details()}") from error
    except TimeoutError as error:
        raise SystemExit(f"{options.target}: the streams do not begin") from error
    columns = ("process", "streams", "streams_stopped", "streams_resumed", "itl_before_s", "itl_during_s", "ratio")
    print(table(columns, [[_shown(found[column]) for column in columns]]))
    publish("stops", found, RESULTS / "stops.jsonl")


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
