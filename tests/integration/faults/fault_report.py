"""What a fault run must be like, checked request by request, and its account to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.integration.faults.asking import Answer, Asking
from tests.integration.faults.clients import Way
from tests.integration.faults.fault_run import Fault, FaultRun
from tests.integration.faults.processes import PROXY
from tests.integration.faults.questions import Question
from tests.integration.served import CAPACITY_WAIT_S

FAILS_WITHIN_S: Final = 10.0
# A byte that was sent before the fault and read after it: a client that shares two cores with replicas that start again reads late.
_ON_ITS_WAY_S: Final = 3.0

# What a stream that has begun may end with: whoever carries it; and a worker, if no other takes its place in the time that requests wait
# for one.
_WAIT_S: Final = {"Gateway": 0.0, PROXY: 0.0, "Decode": CAPACITY_WAIT_S, "Prefill": CAPACITY_WAIT_S}


class FaultReport:
    """Of a run that has ended."""

    def __init__(self, run: FaultRun, answers: Mapping[Question, Answer]) -> None:
        self._run = run
        self._right = {question.prompt: answer for question, answer in answers.items()}
        self.failed = [asking for asking in run.askings if asking.answer is None]

    @property
    def share_right(self) -> float:
        """Of all requests."""
        return sum(self._is_right(asking) for asking in self._run.askings) / len(self._run.askings)

    def complaints(self) -> list[str]:
        """Each request that was answered wrong, or failed without the right to, or not as it should have."""
        return [f"{text}: {self._line(asking)}" for asking in self._run.askings if (text := self._complaint(asking)) is not None]

    def __str__(self) -> str:
        faults = [self._fault_line(fault) for fault in sorted(self._run.faults, key=lambda fault: fault.at_s)]
        share = f"{self.share_right:.1%} of {len(self._run.askings)} requests right"
        return "\n".join([share, *faults, *map(self._line, self.failed)])

    def _is_right(self, asking: Asking) -> bool:
        return asking.answer == self._right[asking.question.prompt]

    def _complaint(self, asking: Asking) -> str | None:
        if asking.answer is not None:
            return None if self._is_right(asking) else "a wrong answer"
        assert asking.failure is not None
        blamed = self._blamed(asking)
        if blamed is None:
            return "no fault had the right to end it"
        assert asking.ended_s is not None
        if asking.ended_s - blamed.until_s > _WAIT_S[blamed.process.kind] + FAILS_WITHIN_S:
            return "it hung"
        return None if _is_honest(asking, blamed) else "not an error of the table"

    def _blamed(self, asking: Asking) -> Fault | None:
        """The last fault that found the stream begun, and may have ended it."""
        found = [fault for fault in self._run.faults if fault.process.kind in _WAIT_S and _had_begun(asking, fault)]
        if asking.way is Way.GRPC:
            found = [fault for fault in found if fault.process.kind != PROXY]
        return max(found, key=lambda fault: fault.at_s, default=None)

    def _fault_line(self, fault: Fault) -> str:
        lost = [asking for asking in self.failed if self._blamed(asking) is fault]
        ends = [f"{len(fault.with_byte)} in flight with a byte, {len(fault.without_byte)} without, {len(lost)} lost"]
        later_s = [
            asking.first_byte_s for asking in self._run.askings if asking.first_byte_s is not None and asking.first_byte_s > fault.at_s
        ]
        if later_s:
            ends.append(f"the next answer began {min(later_s) - fault.at_s:.1f} s later")
        act = "stopped" if fault.lasts_s else "killed"
        at_s = fault.at_s - self._run.askings[0].started_s
        return f"{at_s:6.1f} s  {act} {fault.process.kind:8} {', '.join(ends)}"

    def _line(self, asking: Asking) -> str:
        start_s = self._run.askings[0].started_s
        times = [f"{0.0 if moment is None else moment - start_s:.2f}" for moment in (asking.started_s, asking.first_byte_s, asking.ended_s)]
        end = str(asking.failure) if asking.answer is None else f"{asking.answer}, not {self._right[asking.question.prompt]}"
        return f"  {asking.way.value:6} started {times[0]}, first byte {times[1]}, ended {times[2]} s, {asking.num_pieces} pieces: {end}"


def _had_begun(asking: Asking, fault: Fault) -> bool:
    if asking.first_byte_s is None or asking.ended_s is None:
        return False
    return asking.first_byte_s < fault.until_s + _ON_ITS_WAY_S and fault.at_s < asking.ended_s


def _is_honest(asking: Asking, fault: Fault) -> bool:
    """An error event or a gRPC status; only where the proxy itself died is there nobody left to say more than a broken connection does."""
    assert asking.failure is not None
    expected = {"grpc"} if asking.way is Way.GRPC else {"event"}
    return asking.failure.kind in expected | ({"broken"} if fault.process.kind == PROXY else set())
