"""What the tests over real clusters call more files than before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.process_state import ProcessState
from tests.integration.served import SPARE_SOCKETS, more_held

BEFORE = ProcessState({"socket": 20, "memfd:baton-kv": 1}, 1024, {"baton-kv:7": 2**20}, rss_bytes=0, num_threads=1)


def after(**changes: Any) -> dict[str, ProcessState]:
    return {"decode": dataclasses.replace(BEFORE, **changes)}


def test_a_few_sockets_are_not_more() -> None:
    assert more_held({"decode": BEFORE}, after(open_files={"socket": 20 + SPARE_SOCKETS, "memfd:baton-kv": 1})) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"open_files": {"socket": 21 + SPARE_SOCKETS, "memfd:baton-kv": 1}},
        {"open_files": {"socket": 20, "memfd:baton-kv": 2}},
        {"open_files": {"socket": 20, "memfd:baton-kv": 1, "pipe": 1}},
        {"segments": {"baton-kv:7": 2**20, "baton-kv:8": 1}},
        {"segments": {"baton-kv:7": 2**20 + 1}},
    ],
)
def test_all_else_is(changes: dict[str, Any]) -> None:
    assert list(more_held({"decode": BEFORE}, after(**changes))) == ["decode"]
