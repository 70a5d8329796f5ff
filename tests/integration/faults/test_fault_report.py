"""The judge of fault runs, on runs that never were: it must find what is wrong, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.integration.faults.asking import Answer, Asking
from tests.integration.faults.clients import Failure, Way
from tests.integration.faults.fault_report import FaultReport
from tests.integration.faults.fault_run import Fault, FaultRun
from tests.integration.faults.processes import PROXY, Process
from tests.integration.faults.questions import Question

QUESTION = Question("Who?", max_tokens=4)
RIGHT = Answer("Nobody.", "stop", (2, 3))
EVENT, BROKEN, STATUS = Failure("event", "no_capacity"), Failure("broken", ""), Failure("status", "500 None")


def report(asking: Asking, kind: str, *, lasts_s: float = 0.0) -> FaultReport:
    """One request, and one fault at 10 s."""
    unused: Any = None
    run = FaultRun(unused, unused, [QUESTION], random.Random(0), askings=[asking])
    run.faults.append(Fault(Process(kind, 1), 10.0, lasts_s, [], []))
    return FaultReport(run, {QUESTION: RIGHT})


def asking(way: Way, first_byte_s: float | None, ended_s: float, **end: Any) -> Asking:
    return Asking(QUESTION, way, started_s=1.0, first_byte_s=first_byte_s, ended_s=ended_s, **end)


FINE = [
    (asking(Way.WHOLE, 15.0, 15.0, answer=RIGHT), "Decode"),
    (asking(Way.STREAM, 5.0, 12.0, failure=EVENT), "Decode"),
    (asking(Way.STREAM, 5.0, 45.0, failure=EVENT), "Decode"),  # it has waited for another
    (asking(Way.STREAM, 5.0, 10.1, failure=BROKEN), PROXY),
    (asking(Way.GRPC, 5.0, 12.0, failure=Failure("grpc", "UNAVAILABLE")), "Gateway"),
    (asking(Way.STREAM, 12.5, 12.6, failure=EVENT), "Decode"),  # its byte was on its way
]
WRONG = [
    (asking(Way.WHOLE, 15.0, 15.0, answer=Answer("Somebody.", "stop", (2, 3))), "Decode", "a wrong answer"),
    (asking(Way.WHOLE, 15.0, 15.0, answer=Answer("Nobody.", "stop", (2, 4))), "Decode", "a wrong answer"),
    (asking(Way.WHOLE, None, 12.0, failure=STATUS), "Decode", "no fault had the right"),
    (asking(Way.STREAM, None, 12.0, failure=EVENT), "Gateway", "no fault had the right"),
    (asking(Way.STREAM, 13.5, 14.0, failure=EVENT), "Decode", "no fault had the right"),
    (asking(Way.STREAM, 5.0, 12.0, failure=EVENT), "Router", "no fault had the right"),
    (asking(Way.GRPC, 5.0, 12.0, failure=Failure("grpc", "UNAVAILABLE")), PROXY, "no fault had the right"),
    (asking(Way.STREAM, 5.0, 20.5, failure=EVENT), "Gateway", "it hung"),
    (asking(Way.STREAM, 5.0, 100.5, failure=EVENT), "Decode", "it hung"),
    (asking(Way.STREAM, 5.0, 12.0, failure=BROKEN), "Decode", "not an error of the table"),
    (asking(Way.STREAM, 5.0, 12.0, failure=Failure("unfinished", "")), PROXY, "not an error of the table"),
    (asking(Way.STREAM, 5.0, 12.0, failure=Failure("hangs", "")), "Decode", "not an error of the table"),
]


@pytest.mark.parametrize(("asked", "kind"), FINE)
def test_what_a_kill_may_do(asked: Asking, kind: str) -> None:
    assert report(asked, kind).complaints() == []


@pytest.mark.parametrize(("asked", "kind", "complaint"), WRONG)
def test_what_it_may_not(asked: Asking, kind: str, complaint: str) -> None:
    found = report(asked, kind)
    [said] = found.complaints()
    assert said.startswith(complaint)
    assert found.share_right == 0.0
    assert kind in str(found)


def test_a_stream_may_end_after_a_stop() -> None:
    assert report(asking(Way.STREAM, 5.0, 35.0, failure=EVENT), "Gateway", lasts_s=20.0).complaints() == []
    assert report(asking(Way.STREAM, 5.0, 41.0, failure=EVENT), "Gateway", lasts_s=20.0).complaints() != []
