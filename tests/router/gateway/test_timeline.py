"""The sums of one request's times (promise P5), on a clock that the test sets."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from cluster.pb import worker_pb2 as pb
from router.gateway.metrics import GatewayMetrics
from router.gateway.timeline import Timeline

START_S = 1000.0


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds since the request arrived."""

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: START_S + seconds)

    set_clock(0.0)
    return set_clock


def test_what_no_stage_explains_is_left_of_both_sums(at: Callable[[float], None]) -> None:
    registry = CollectorRegistry()
    at(0.5)
    timeline = Timeline(START_S, GatewayMetrics(registry))
    at(2.0)
    timeline.placed(router_queue_s=1.25)
    timeline.prefilled(wait_s=0.25, prefill_s=4.0)
    at(6.5)
    timeline.tokens(1)  # 0.25 s of hops
    at(7.5)
    timeline.decode_asked()  # the reader took its time
    at(8.5)
    timeline.decode_asked()  # the first one declined
    timeline.kv_taken(pb.KVTaken(wait_s=0.25, transfer_s=0.5))
    at(10.0)
    timeline.tokens(1, decode_wait_s=0.125, step_s=0.5)  # 0.125 s of hops
    timeline.finished()
    found = timeline.timings()
    assert (found.gateway_s, found.queue_s, found.prefill_wait_s, found.prefill_s) == (0.5, 1.5, 0.25, 4.0)
    assert (found.transfer_s, found.decode_wait_s, found.first_step_s) == (0.5, 0.375, 0.5)
    assert found.extra == {
        "router_queue_s": 1.25,
        "failed_attempts_s": 0.0,
        "recompute_s": 0.0,
        "handoff_s": 1.0,
        "declined_s": 1.0,
        "ttft_s": 6.5,
        "ttft_unexplained_s": 0.25,
        "e2e_s": 10.0,
        "second_token_s": 3.5,
        "second_token_unexplained_s": 0.125,
        "exposed_transfer_s": 3.0,
    }
    assert registry.get_sample_value("baton_stage_seconds_sum", {"stage": "decode_wait"}) == 0.375


def test_what_the_prefill_hides_is_in_no_stage(at: Callable[[float], None]) -> None:
    """The decode worker is asked at the offer, declines, is asked again; it finds room 0.25 s after the first token."""
    registry = CollectorRegistry()
    timeline = Timeline(START_S, GatewayMetrics(registry))
    timeline.placed(router_queue_s=0.0)
    at(1.0)
    timeline.decode_asked()
    at(2.0)
    timeline.decode_asked()
    at(4.0)
    timeline.prefilled(wait_s=0.5, prefill_s=3.5)
    timeline.tokens(1)
    timeline.kv_taken(pb.KVTaken(wait_s=2.25, transfer_s=0.5))
    at(5.0)
    timeline.tokens(1, decode_wait_s=0.0625, step_s=0.125)
    timeline.finished()
    found = timeline.timings()
    assert (found.transfer_s, found.decode_wait_s, found.first_step_s) == (0.5, 0.3125, 0.125)
    assert (found.extra["handoff_s"], found.extra["declined_s"]) == (0.0, 0.0)
    assert (found.extra["second_token_s"], found.extra["second_token_unexplained_s"]) == (1.0, 0.0625)
    assert found.extra["exposed_transfer_s"] == 0.875
    assert registry.get_sample_value("baton_exposed_transfer_seconds_sum") == 0.875


def test_a_decline_that_is_partly_hidden_counts_from_the_first_token(at: Callable[[float], None]) -> None:
    timeline = Timeline(START_S, GatewayMetrics(CollectorRegistry()))
    timeline.placed(router_queue_s=0.0)
    timeline.decode_asked()
    at(4.0)
    timeline.prefilled(wait_s=0.5, prefill_s=3.5)
    timeline.tokens(1)
    at(4.5)
    timeline.decode_asked()
    timeline.kv_taken(pb.KVTaken(wait_s=0.125, transfer_s=0.25))
    at(5.0)
    timeline.tokens(1, step_s=0.125)
    found = timeline.timings()
    assert (found.extra["declined_s"], found.decode_wait_s, found.transfer_s) == (0.5, 0.125, 0.25)
    assert found.extra["second_token_unexplained_s"] == 0.0


def test_where_one_worker_does_both_there_is_no_handoff(at: Callable[[float], None]) -> None:
    timeline = Timeline(START_S, GatewayMetrics(CollectorRegistry()))
    timeline.placed(router_queue_s=0.0)
    timeline.prefilled(wait_s=0.5, prefill_s=1.0)
    at(2.0)
    timeline.tokens(1)
    at(3.0)
    timeline.tokens(1, decode_wait_s=0.25, step_s=0.5)
    found = timeline.timings().extra
    assert found["handoff_s"] == 0.0
    assert (found["ttft_unexplained_s"], found["second_token_unexplained_s"]) == (0.5, 0.25)


def test_an_attempt_lost_between_the_first_two_tokens_is_part_of_the_handoff(at: Callable[[float], None]) -> None:
    timeline = Timeline(START_S, GatewayMetrics(CollectorRegistry()))
    timeline.placed(router_queue_s=0.0)
    timeline.prefilled(wait_s=0.0, prefill_s=1.0)
    at(1.0)
    timeline.tokens(1)
    at(1.5)
    timeline.decode_asked()
    timeline.kv_taken(pb.KVTaken(wait_s=0.5, transfer_s=0.5))
    at(4.0)
    timeline.attempt_failed()
    at(5.0)
    timeline.placed(router_queue_s=1.0)
    at(7.0)
    timeline.prefilled(wait_s=1.0, prefill_s=1.0)
    at(7.5)
    timeline.decode_asked()
    timeline.kv_taken(pb.KVTaken(wait_s=0.25, transfer_s=0.5))
    at(9.0)
    timeline.tokens(1, decode_wait_s=0.25, step_s=0.25)
    found = timeline.timings()
    assert (found.queue_s, found.prefill_wait_s, found.prefill_s) == (0.0, 0.0, 1.0), "of the attempt that gave the first token"
    assert (found.transfer_s, found.decode_wait_s, found.first_step_s) == (0.5, 0.5, 0.25)
    extra = found.extra
    assert (extra["failed_attempts_s"], extra["recompute_s"], extra["handoff_s"]) == (0.0, 5.0, 6.5)
    assert (extra["ttft_unexplained_s"], extra["second_token_unexplained_s"]) == (0.0, 0.25)


def test_an_attempt_lost_later_changes_no_stage(at: Callable[[float], None]) -> None:
    timeline = Timeline(START_S, GatewayMetrics(CollectorRegistry()))
    timeline.prefilled(wait_s=0.0, prefill_s=0.0)
    timeline.tokens(1)
    at(1.0)
    timeline.tokens(1, step_s=1.0)
    before = timeline.timings()
    at(2.0)
    timeline.attempt_failed()
    timeline.prefilled(wait_s=9.0, prefill_s=9.0)
    timeline.decode_asked()
    timeline.kv_taken(pb.KVTaken(wait_s=9.0, transfer_s=9.0))
    at(5.0)
    timeline.tokens(1, decode_wait_s=9.0, step_s=9.0)
    after = timeline.timings()
    assert after.extra.pop("recompute_s") == 3.0 and before.extra.pop("recompute_s") == 0.0
    assert after.extra.pop("e2e_s") == 5.0 and before.extra.pop("e2e_s") == 1.0
    assert after == before
