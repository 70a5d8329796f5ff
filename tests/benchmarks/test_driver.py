"""Paces: an open loop sends by the clock whatever the answers do, a closed loop by the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks.load.answer import Answer
from benchmarks.load.driver import Budget, ClosedLoop, Driver, OpenLoop, Pace
from benchmarks.load.requests import LoadRequest
from benchmarks.load.trace import Trace
from tests.benchmarks.fake_transport import FakeTransport


class Always:
    """One request every `gap_s`."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s

    def times_s(self, seed: int) -> Iterator[float]:
        return (index * self._gap_s for index in count())


def requests() -> Iterator[LoadRequest]:
    return (LoadRequest((1,), index + 1) for index in count())


async def test_a_closed_loop_keeps_its_users_busy() -> None:
    transport = FakeTransport(delay_s=0.001)
    result = await Driver(transport, "tiny").run(requests(), ClosedLoop(3), Budget(20))
    assert transport.num_sent == len(result.answered) == 20
    assert transport.most_running == 3


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    gate = asyncio.Event()
    transport = FakeTransport(gate=gate)
    driver = Driver(transport, "tiny")
    run = asyncio.create_task(driver.run(requests(), OpenLoop(Always(0.001), 0), Budget(10)))
    await transport.all_sent.wait()
    assert not driver.traces
    gate.set()
    result = await run
    assert len(result.answered) == transport.most_running == 10


async def test_an_open_loop_says_how_late_it_was() -> None:
    class Blocking(FakeTransport):
        async def send(self, request: LoadRequest, model: str, answer: Answer) -> None:
            time.sleep(0.05)  # noqa: ASYNC251  # the loop itself is busy, as it would be with too many events
            await super().send(request, model, answer)

    result = await Driver(Blocking(), "tiny").run(requests(), OpenLoop(Always(0.001), 0), Budget(5))
    lags = [trace.lag_s for trace in result.traces]
    assert lags == sorted(lags)
    assert lags[-1] >= 4 * 0.05 - 4 * 0.001
    assert all(trace.sent_s >= trace.scheduled_s for trace in result.traces)


@pytest.mark.parametrize("pace", [OpenLoop(Always(0.01), 0), ClosedLoop(1)])
async def test_sends_nothing_after_the_duration(pace: Pace) -> None:
    result = await Driver(FakeTransport(delay_s=0.01), "tiny").run(requests(), pace, Budget(1000, duration_s=0.1))
    assert 1 <= len(result.traces) <= 11
    assert all(trace.scheduled_s <= 0.1 for trace in result.traces)
    assert result.duration_s >= max(trace.ended_s for trace in result.traces)


async def test_failures_are_traces_and_do_not_stop_the_run() -> None:
    seen: list[Trace] = []
    result = await Driver(FakeTransport(failing=True), "tiny", seen.append).run(requests(), ClosedLoop(2), Budget(9))
    assert [trace.error_kind for trace in result.traces].count("http_429") == 3
    assert list(result.traces) == seen
    assert len(result.answered) == 6
    assert all(trace.num_output_tokens == 2 for trace in result.answered)
    assert result.output_tokens_per_s == pytest.approx(12 / result.duration_s)
