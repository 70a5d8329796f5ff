"""Prefix keys are equal exactly when the KV is."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.prefix_chain import PrefixChain
from cluster.prefix import block_key, root_key

ROOT = root_key(checkpoint="c", domain="d")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def block_keys(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    return PrefixChain(ROOT, block_size).keys(token_ids, len(token_ids))


@given(TOKENS, TOKENS, st.sampled_from([1, 4, 8]))
def test_keys_agree_exactly_on_the_common_prefix(first: list[int], second: list[int], block_size: int) -> None:
    first_keys, second_keys = block_keys(first, block_size), block_keys(second, block_size)
    assert len(first_keys) == len(first) // block_size  # only full blocks have keys
    for index, (a, b) in enumerate(zip(first_keys, second_keys, strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (first[:end] == second[:end])


def test_a_key_covers_what_came_before() -> None:
    assert block_keys([1, 2, 3, 4], 2)[1] != block_keys([9, 9, 3, 4], 2)[1]
    assert block_keys([7, 7, 7, 7], 2)[0] != block_keys([7, 7, 7, 7], 2)[1]


def test_keys_are_a_chain() -> None:
    first = block_key(ROOT, [1, 2])
    assert block_keys([1, 2, 3, 4, 5], 2) == [first, block_key(first, [3, 4])]
    assert block_keys((1, 2), 2) == [first]
    assert len(first) == len(ROOT) == 16


def test_roots_separate_everything() -> None:
    parts = ("checkpoint", "domain", "adapter", "cache_salt")
    base = dict.fromkeys(parts, "x")
    roots = [root_key(**base), *(root_key(**(base | {part: "y"})) for part in parts)]
    assert len(set(roots)) == len(roots)


def test_text_cannot_move_between_the_parts_of_a_root() -> None:
    assert root_key(checkpoint="ab", domain="c") != root_key(checkpoint="a", domain="bc")
    assert root_key(checkpoint="a", domain="b", cache_salt="c") != root_key(checkpoint="a", domain="b", adapter="c")


def test_keys_are_the_same_in_every_process() -> None:
    """Fixed for good: workers of different versions may compare them."""
    assert ROOT.hex() == "cb31331d36e7da882ffb6179de405e20"
    assert block_key(ROOT, range(32)).hex() == "e4e0bda9c7b0b60b6690fdf0e5e87ad5"
