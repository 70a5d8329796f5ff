"""Stop strings against an oracle that reads one character at a time, at every way to cut the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.stop_strings import StopStrings

ALPHABET = "ab\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string that is complete, and that stop."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def feed(parts: list[str], stops: list[str]) -> tuple[list[str], StopStrings]:
    checker = StopStrings(stops)
    sent = [checker.push(part) for part in parts]
    return [*sent, checker.flush()], checker


@given(st.lists(st.text(ALPHABET, max_size=5), max_size=6), STOPS)
def test_text_and_match_equal_the_oracle_however_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    sent, checker = feed(parts, stops)
    assert ("".join(sent), checker.matched) == oracle("".join(parts), stops)


@given(st.text(ALPHABET, max_size=12), STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopStrings(stops)
    sent = ""
    for index, char in enumerate(text):
        sent += checker.push(char)
        if checker.matched is not None:
            return
        seen = text[: index + 1]
        held = max((n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0)
        assert sent == seen[: len(seen) - held]


def test_nothing_follows_a_match() -> None:
    checker = StopStrings(["END"])
    assert checker.push("one E") == "one "
    assert checker.push("ND two") == ""
    assert checker.push("three") == ""
    assert checker.flush() == ""
    assert checker.matched == "END"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStrings([]).push("abc") == "abc"
