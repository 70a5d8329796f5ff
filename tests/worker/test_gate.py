from __future__ import annotations

import pytest

from cluster.errors import Draining, StaleEpoch, WorkerRefusal, WrongIncarnation
from cluster.pb import worker_pb2 as pb
from cluster.types import WorkerState
from cluster.worker.gate import Gate


def header(incarnation: str = "me", epoch: int = 7) -> pb.Header:
    return pb.Header(incarnation=incarnation, router_epoch=epoch)


def refusal(gate: Gate, call: pb.Header) -> WorkerRefusal:
    with pytest.raises(WorkerRefusal) as error:
        gate.check(call)
    return error.value


def test_the_highest_epoch_seen_counts_wherever_it_came_from() -> None:
    gate = Gate("me")
    gate.check(header(epoch=7))
    assert gate.router_epoch == 7
    gate.learn_epoch(9)
    assert isinstance(refusal(gate, header(epoch=8)), StaleEpoch)
    gate.check(header(epoch=9))
    gate.check(header(epoch=12))
    gate.learn_epoch(3)
    assert gate.router_epoch == 12


@pytest.mark.parametrize("incarnation", ["", "other", "me "])
def test_another_life_is_refused_and_teaches_no_epoch(incarnation: str) -> None:
    gate = Gate("me")
    assert isinstance(refusal(gate, header(incarnation, epoch=50)), WrongIncarnation)
    assert gate.router_epoch == 0


def test_a_header_without_epoch_is_stale_once_a_router_is_known() -> None:
    gate = Gate("me")
    gate.check(header(epoch=0))
    gate.learn_epoch(1)
    assert isinstance(refusal(gate, header(epoch=0)), StaleEpoch)


def test_a_closed_gate_refuses_good_calls() -> None:
    gate = Gate("me")
    states = [gate.state]
    gate.close()
    states.append(gate.state)
    assert states == [WorkerState.RUNNING, WorkerState.DRAINING]
    assert isinstance(refusal(gate, header()), Draining)
    assert gate.router_epoch == 7, "a newer router is learned of even while draining"
