"""Which streams a stop stops, and what is said of the others."""

from __future__ import annotations

import os

import pytest

from benchmarks.memory import command_of, resident_bytes
from benchmarks.stops import EndedEarly, Stop, TimedStream
from cluster.pb import inference_pb2 as pb
from tests.benchmarks.fake_inference import FakeInference, Script, serving


def every(gap_s: float, start_s: float, end_s: float) -> list[float]:
    count = int((end_s - start_s) / gap_s)
    return [start_s + index * gap_s for index in range(count)]


def test_only_streams_that_go_on_are_compared() -> None:
    stop = Stop(20.0, 40.0)
    unmoved = TimedStream(every(0.5, 0.0, 20.0) + every(1.0, 20.0, 60.0))
    resumed = TimedStream(every(0.1, 0.0, 21.0) + every(0.1, 40.5, 60.0))
    failed = TimedStream(every(0.1, 0.0, 20.0), failure="UNAVAILABLE")
    found = stop.figures([unmoved, resumed, failed])
    assert (found["streams"], found["streams_stopped"], found["streams_resumed"]) == (3, 2, 1)
    assert (found["itl_before_s"], found["itl_during_s"], found["ratio"]) == pytest.approx((0.5, 1.0, 2.0))
    assert found["failures"] == ["UNAVAILABLE"]


def test_no_stream_goes_on() -> None:
    found = Stop(20.0, 40.0).figures([TimedStream(every(0.5, 0.0, 20.0))])
    assert found["ratio"] is None


def test_a_stream_that_is_answered_too_early_is_not_taken_for_a_stopped_one() -> None:
    early = TimedStream(every(0.1, 0.0, 29.0), finish="length")
    after = TimedStream(every(0.1, 0.0, 45.0), finish="length")
    with pytest.raises(EndedEarly, match=r"^1 of 2 streams .*: 290 messages, length$"):
        Stop(20.0, 40.0).figures([early, after])
    assert Stop(20.0, 40.0).figures([after])["streams_stopped"] == 0


async def test_a_stream_knows_why_it_ended() -> None:
    async with serving(FakeInference(Script(), Script(is_finished=False))) as target:
        streams = [TimedStream(), TimedStream()]
        for stream in streams:
            await stream.run(target, pb.GenerateRequest())
    assert [stream.finish for stream in streams] == ["length", None]


def test_memory_grows_with_what_is_held() -> None:
    before = resident_bytes(os.getpid())
    held = bytearray(os.urandom(32 * 2**20))
    assert resident_bytes(os.getpid()) - before > len(held) // 2
    assert command_of(os.getpid())
    assert command_of(2**22 + 1) == ""
