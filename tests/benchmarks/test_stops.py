"""Which streams a stop stops, and what is said of the others against their control."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.interruption.comparison import Pair, Sample, control_spread
from benchmarks.interruption.load import Load, until_reached
from benchmarks.interruption.memory_watch import MemoryWatch
from benchmarks.interruption.session import Schedule, measure
from benchmarks.interruption.stop import EndedEarly, Stop
from benchmarks.interruption.timed_stream import TimedStream
from benchmarks.memory import command_of, resident_bytes
from cluster.errors import NoCapacity
from cluster.pb import inference_pb2 as pb
from tests.benchmarks.fake_inference import FakeInference, Script, serving

STOP = Stop(20.0, 40.0)


def stream(*times_s: float, failure: str | None = None, finish: str | None = None) -> TimedStream:
    """One token at each time."""
    return TimedStream([(at_s, index) for index, at_s in enumerate(times_s, 1)], failure, finish)


def every(gap_s: float, start_s: float, end_s: float) -> list[float]:
    count = int((end_s - start_s) / gap_s)
    return [start_s + index * gap_s for index in range(count)]


def growing(start_s: float, count: int, factor: float = 1.0) -> list[float]:
    """A stream whose tokens come slower the longer it is."""
    times_s = [start_s]
    for index in range(count):
        times_s.append(times_s[-1] + factor * (0.5 + index / 100))
    return times_s


def test_tokens_are_compared_at_their_positions() -> None:
    """A stream that is slower than before, but not slower than at the same length without a stop, is not slowed."""
    pair = Pair(STOP, [stream(*growing(0.0, 70))], [stream(*growing(500.0, 70))])
    found = pair.figures()
    assert found["ratio"] == found["ratio_p99"] == 1.0
    assert found["stop"]["itl_p50_s"] > 0.7, "the first was 0.5 s"
    assert found["tokens"] == sum(20.0 < at_s < 40.0 for at_s in growing(0.0, 70)) + 1, "with the one whose gap the end cut"


def test_only_streams_that_go_on_are_compared() -> None:
    streams = [
        stream(*every(1.0, 0.0, 60.0)),
        stream(*every(0.1, 0.0, 20.5), *every(0.1, 40.5, 60.0)),
        stream(*every(0.1, 0.0, 20.0), failure="UNAVAILABLE"),
    ]
    found = Pair(STOP, streams, [stream(*every(0.5, 100.0, 130.0)) for _ in streams]).figures()
    assert (found["streams_stopped"], found["streams_resumed"], found["failures"]) == (2, 1, ["UNAVAILABLE"])
    assert (found["ratio"], found["tokens"]) == (2.0, 20)


def test_a_pause_is_not_hidden_by_the_median() -> None:
    """Eight seconds without a token, then on to the end: the median knows nothing of it."""
    times_s = [*every(0.1, 0.0, 25.0), *every(0.1, 33.0, 60.0)]
    found = Pair(STOP, [stream(*times_s)], [stream(*every(0.1, 0.0, 60.0))]).figures()
    assert found["streams_stopped"] == 0
    assert found["ratio"] == pytest.approx(1.0)
    assert (found["stop"]["longest_gap_s"], found["control"]["longest_gap_s"]) == pytest.approx((8.1, 0.1), abs=1e-4)


def test_a_pause_to_the_end_of_the_stop_is_a_gap_too() -> None:
    times_s = [*every(0.1, 0.0, 25.0), *every(0.1, 44.0, 60.0)]
    found = Pair(STOP, [stream(*times_s)], [stream(*every(0.1, 0.0, 60.0))]).figures()
    assert found["stop"]["longest_gap_s"] == pytest.approx(19.1, abs=1e-4)


def test_tokens_that_come_together_share_their_gap() -> None:
    paired = TimedStream([(at_s, 2 * index) for index, at_s in enumerate(every(1.0, 0.0, 60.0), 1)])
    found = Pair(STOP, [paired], [stream(*every(0.5, 0.0, 60.0))]).figures()
    assert (found["ratio"], found["stop"]["itl_p50_s"], found["stop"]["longest_gap_s"]) == (1.0, 0.5, 1.0)


def test_no_stream_goes_on() -> None:
    found = Pair(STOP, [stream(*every(0.5, 0.0, 20.0))], [stream(*every(0.5, 0.0, 20.0))]).figures()
    assert (found["ratio"], found["tokens"], found["streams_stopped"]) == (None, 0, 1)


def test_pairs_are_joined_by_their_tokens() -> None:
    joined = Sample.joined([Sample((0.1, 0.1), (0.1, 0.1), 0.2, 0.1), Sample((0.1,), (0.3,), 0.1, 0.3)]).figures()
    assert (joined["tokens"], joined["ratio"], joined["ratio_p99"]) == (3, 1.0, 3.0)
    assert (joined["control"]["longest_gap_s"], joined["stop"]["longest_gap_s"]) == (0.2, 0.3)


def test_controls_that_differ_tell_what_a_ratio_is_worth() -> None:
    slow, fast = (Pair(STOP, [stream(*every(0.5, 0.0, 60.0))], [stream(*every(gap_s, 0.0, 60.0))]) for gap_s in (0.6, 0.5))
    assert control_spread([slow, fast]) == 1.2
    assert control_spread([slow]) is None


def test_a_stream_that_is_answered_too_early_is_not_taken_for_a_stopped_one() -> None:
    early = stream(*every(0.1, 0.0, 29.0), finish="length")
    after = stream(*every(0.1, 0.0, 45.0), finish="length")
    with pytest.raises(EndedEarly, match=r"^1 of 2 streams .*: 290 tokens, length$"):
        STOP.check([early, after])
    STOP.check([after])


async def test_a_stream_knows_its_tokens_and_why_it_ended() -> None:
    async with serving(FakeInference(Script(), Script(is_finished=False))) as target:
        streams = [TimedStream(), TimedStream()]
        for each in streams:
            await each.run(target, pb.GenerateRequest())
    assert [each.finish for each in streams] == ["length", None]
    assert [number for _, number in streams[0].arrivals] == [1, 4]


async def test_no_run_finds_the_prompts_of_another_in_a_cache() -> None:
    endless = Script(tuple((0.01, "a", 1) for _ in range(1000)))
    async with serving(fake := FakeInference(endless)) as target:
        load = await Load.of(target, 2)
        for _ in range(2):
            async with load.running() as streams:
                await until_reached(streams, [5, 3], limit_s=20.0)
                assert streams[0].num_tokens >= 5
    assert len({request.cache_salt for request in fake.seen}) == 4
    assert sorted(request.seed for request in fake.seen) == [0, 0, 1, 1]


async def test_a_stream_that_fails_without_a_stop_ends_the_run() -> None:
    failing = Script(((0.0, "a", 1),), is_finished=False, failure=NoCapacity("no worker"))
    async with serving(FakeInference(failing)) as target:
        load = await Load.of(target, 1)
        with pytest.raises(EndedEarly, match="1 of 1 streams failed though no process was stopped: UNAVAILABLE"):
            async with load.running() as streams:
                await until_reached(streams, [2], limit_s=20.0)


@pytest.fixture
def replica() -> Iterator[subprocess.Popen[bytes]]:
    """A process that may be stopped, with a title as Ray gives it."""
    with subprocess.Popen(["ray::ServeReplica:baton:Prefill.books", "60"], executable="/bin/sleep") as process:
        yield process
        process.kill()


async def test_a_stop_ends(replica: subprocess.Popen[bytes]) -> None:
    stopping = asyncio.create_task(Stop.of(replica.pid, 0.3))
    await asyncio.sleep(0.1)
    assert state(replica.pid) == "T"
    stop = await stopping
    assert state(replica.pid) != "T"
    assert stop.ended_s - stop.started_s >= 0.3


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_runs_with_and_without_a_stop_in_turn(replica: subprocess.Popen[bytes]) -> None:
    """Streams that need nothing of the stopped process."""
    steady = Script(tuple((0.01, "a", 1) for _ in range(1000)))
    async with serving(FakeInference(steady)) as target:
        found = await measure(target, replica.pid, 2, Schedule(stop_s=1.5, lead_s=0.1, watch_s=0.1, rest_s=0.0))
    assert [(pair["streams_stopped"], pair["failures"]) for pair in found["pairs"]] == [(0, [])] * 2
    assert found["tokens"] == sum(pair["tokens"] for pair in found["pairs"]) > 2 * 2 * 20
    assert found["stop"]["itl_p50_s"] > 0.009 < found["control"]["itl_p50_s"]
    assert found["processes_ended"] == []


async def test_a_process_that_is_not_there() -> None:
    async with serving(FakeInference()) as target:
        with pytest.raises(ProcessLookupError):
            await measure(target, 2**22 + 1, 1, Schedule())
    with pytest.raises(ProcessLookupError):
        MemoryWatch(2**22 + 1)


async def test_a_replica_is_known_whichever_method_its_title_names(replica: subprocess.Popen[bytes]) -> None:
    memory = MemoryWatch(replica.pid)
    async with memory.watching():
        assert memory.names[replica.pid] == "ray::ServeReplica:baton:Prefill"
        assert memory.ended == []
        replica.kill()
        replica.wait()
    assert memory.ended == [f"ray::ServeReplica:baton:Prefill {replica.pid}"]


def test_memory_grows_with_what_is_held() -> None:
    before = resident_bytes(os.getpid())
    held = bytearray(os.urandom(32 * 2**20))
    assert resident_bytes(os.getpid()) - before > len(held) // 2
    assert command_of(os.getpid())
    assert command_of(2**22 + 1) == ""
