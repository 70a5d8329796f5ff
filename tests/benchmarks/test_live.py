"""The lines that a run says of itself."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.load.driver import Driver
from benchmarks.load.live import LiveReport
from benchmarks.load.trace import Chunk, Trace
from tests.benchmarks.fake_transport import FakeTransport

ANSWERED = Trace(0.0, 0.0, 1.0, (Chunk(0.25, 1, None),), 8, 1)


def test_a_line_counts_all_and_times_what_is_new() -> None:
    driver = Driver(FakeTransport(), "tiny")
    report = LiveReport(driver)
    assert report.line() == "0 s: 0 sent, 0 running, 0 answered"
    driver.num_sent = 5
    driver.traces += [ANSWERED, replace(ANSWERED, error_kind="dropped")]
    assert report.line() == "0 s: 5 sent, 3 running, 1 answered, 1 failed, TTFT p50 0.250 s of the last 1"
    driver.traces += [replace(ANSWERED, chunks=(Chunk(0.5, 1, None),))] * 2
    assert report.line() == "0 s: 5 sent, 1 running, 3 answered, 1 failed, TTFT p50 0.500 s of the last 2"
    assert report.line() == "0 s: 5 sent, 1 running, 3 answered, 1 failed"
