"""The order key: strict in the priority, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import PriorityClass, RouterConfig, load_config
from cluster.errors import ConfigError
from router.control.order import OrderStamper, anchored_clock

STAMPER = OrderStamper(RouterConfig().classes)
WIDE = OrderStamper(  # every class has levels
    [
        PriorityClass(name=name, up_to=up_to, slack_s=slack_s)
        for name, up_to, slack_s in (("a", 0, 0.0), ("b", 2**33, 10.0), ("c", 2**41, 30.0))
    ]
)
PRIORITIES = st.integers(-(2**40), 2**40)


def test_class_edges() -> None:
    assert [STAMPER.class_name(p) for p in (-(2**63), -1, 0, 1, 2**31 - 1, 2**62)] == ["high", "high", "normal", "low", "low", "low"]
    assert [STAMPER.slack_s(p) for p in (-1, 0, 1)] == [0.0, 10.0, 60.0]


@given(st.integers(-100_000, 100_000))
def test_lower_priority_goes_first_between_simultaneous_arrivals(priority: int) -> None:
    now_s = 1.8e9  # a wall clock: the coarsest floats that a key sees
    later_arrival = STAMPER.stamp(priority, now_s)
    earlier_arrival = OrderStamper(RouterConfig().classes).stamp(priority + 1, now_s)
    assert later_arrival < earlier_arrival


@given(PRIORITIES, PRIORITIES)
def test_slack_never_falls_and_levels_stay_clear_of_the_next_class(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert WIDE.slack_s(low) <= WIDE.slack_s(high)
    if WIDE.class_name(low) != WIDE.class_name(high):
        assert WIDE.slack_s(high) - WIDE.slack_s(low) >= 5.0


def test_the_last_level_of_a_class_goes_before_the_first_of_the_next() -> None:
    assert WIDE.slack_s(2**40) - WIDE.slack_s(2**33) >= 0
    assert WIDE.slack_s(2**33 + 1) - WIDE.slack_s(2**33) >= 5.0


@given(PRIORITIES, PRIORITIES)
def test_no_request_is_overtaken_after_the_bound(one: int, other: int) -> None:
    waiting = STAMPER.stamp(one, 0.0)
    newcomer = STAMPER.stamp(other, STAMPER.max_overtake_s + 1e-6)
    assert waiting < newcomer


def test_equal_keys_keep_the_order_of_arrival() -> None:
    assert STAMPER.stamp(3, 5.0) < STAMPER.stamp(3, 5.0)


def test_a_single_class_still_orders_by_priority() -> None:
    stamper = OrderStamper([PriorityClass(name="all", up_to=0, slack_s=0.0)])
    assert stamper.slack_s(-2) < stamper.slack_s(-1) < stamper.slack_s(0)
    assert stamper.class_name(7) == "all"


def test_equal_slacks_are_refused_by_name() -> None:
    classes = [{"name": "a", "up_to": 0, "slack_s": 1.0}, {"name": "b", "up_to": 1, "slack_s": 1.0}]
    with pytest.raises(ConfigError, match="slack_s must rise"):
        load_config({"model": "m", "router": {"classes": classes}})


def test_the_anchored_clock_never_steps_back() -> None:
    clock = anchored_clock()
    readings = [clock() for _ in range(100)]
    assert readings == sorted(readings)
