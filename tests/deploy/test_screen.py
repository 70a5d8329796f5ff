"""The reader of terminals: it must not wait for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.deploy import screen


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_texts_come_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"one\ntwo")
    assert screen.read_until(reader, "zero", "two", seen="zero ") == "zero one\ntwo"


def test_silence_ends(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LIMIT_S", 0.1)
    os.write(pipe[1], b"two one")
    with pytest.raises(AssertionError, match="two one"):
        screen.read_until(pipe[0], "one", "two")
