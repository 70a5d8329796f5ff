"""Which rules the config takes, and what it says of those that make no sense."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import load_config
from cluster.errors import ConfigError
from cluster.faults.points import FaultAction, FaultPoint

CORRUPTIBLE = {FaultPoint.OFFER, FaultPoint.FIRST_TOKEN, FaultPoint.FOLLOW, FaultPoint.FETCH_CHUNK}


def args(*rules: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model": "demo", "fault_injection": {"seed": 7, "rules": list(rules)}, "kv_transfer": {"checksums": True}, **changes}


def rule(point: FaultPoint, action: FaultAction) -> dict[str, Any]:
    return {"point": point.value, "action": action.value, **({"delay_s": 0.1} if action is FaultAction.DELAY else {})}


def error_of(arguments: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    return caught.value


def test_nothing_is_injected_by_default() -> None:
    assert load_config({"model": "demo"}).fault_injection.rules == ()


@pytest.mark.parametrize("point", FaultPoint)
@pytest.mark.parametrize("action", FaultAction)
def test_an_action_is_taken_where_it_makes_sense(point: FaultPoint, action: FaultAction) -> None:
    arguments = args(rule(point, action))
    if action is not FaultAction.CORRUPT or point in CORRUPTIBLE:
        [found] = load_config(arguments).fault_injection.rules
        assert (found.point, found.action) == (point, action)
    else:
        error = error_of(arguments)
        assert error.param == "fault_injection.rules.0.action"
        assert error.message == f"fault_injection.rules.0.action: corrupt makes no sense at {point}; there are delay, drop, kill"


def test_corrupt_blocks_need_checksums_to_be_noticed() -> None:
    error = error_of(args(rule(FaultPoint.FETCH_CHUNK, FaultAction.CORRUPT), kv_transfer={"checksums": False}))
    assert error.param == "fault_injection.rules.0.action"
    assert "kv_transfer.checksums" in error.message


def test_a_point_that_is_never_reached_is_refused() -> None:
    error = error_of(args(rule(FaultPoint.DECODE_TOKENS, FaultAction.DROP), rule(FaultPoint.COMMIT, FaultAction.DROP), mode="colocated"))
    assert error.param == "fault_injection.rules.1.point"
    assert load_config(args(rule(FaultPoint.DECODE_TOKENS, FaultAction.DROP), mode="colocated")).fault_injection.rules


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"point": "fetch.stop"}, "point"),
        ({"action": "explode"}, "action"),
        ({"probability": 0}, "probability"),
        ({"probability": 1.1}, "probability"),
        ({"every": 0}, "every"),
        ({"after": -1}, "after"),
        ({"max_count": 0}, "max_count"),
        ({"delay_s": 1}, "delay_s"),
        ({"action": "delay"}, "delay_s"),
        ({"action": "delay", "delay_s": 0}, "delay_s"),
        ({"often": 1}, "often"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], key: str) -> None:
    error = error_of(args({**rule(FaultPoint.COMMIT, FaultAction.DROP), **change}))
    assert error.param == f"fault_injection.rules.0.{key}"


def test_a_rule_reads_well() -> None:
    [found] = load_config(args({"point": "commit", "action": "delay", "delay_s": 0.5, "every": 3})).fault_injection.rules
    assert str(found) == "point=commit action=delay every=3 delay_s=0.5"
