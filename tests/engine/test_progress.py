"""The rule that keeps a pool with bounded host memory from coming to a halt."""

from __future__ import annotations

from cluster.engine.progress import Claim, can_all_finish


def check(*claims: Claim, num_blocks: int = 10, num_host_slots: int = 0) -> bool:
    return can_all_finish(claims, num_blocks=num_blocks, num_host_slots=num_host_slots)


def test_each_must_fit_beside_those_after_it() -> None:
    assert check(Claim([0, 1, 2], 8), Claim([3, 4], 4))
    assert not check(Claim([0, 1, 2], 8), Claim([3, 4], 4, num_new=1))
    assert check(Claim([0, 1, 2], 8), Claim([3, 4], 4, num_new=1), num_host_slots=1)


def test_those_before_it_are_gone_by_then() -> None:
    assert check(Claim([0, 1, 2, 3, 4, 5], 7), Claim([6, 7], 10))
    assert not check(Claim([6, 7], 10), Claim([0, 1, 2, 3, 4, 5], 7))


def test_a_shared_block_counts_once() -> None:
    assert check(Claim([0, 1, 2, 3], 9), Claim([0, 1, 2, 4], 5))
    assert not check(Claim([0, 1, 2, 3], 9), Claim([5, 6, 7, 4], 5))


def test_what_is_new_counts_to_the_asker_and_against_the_ones_before() -> None:
    assert check(Claim([0], 9), Claim([], 9, num_new=1))
    assert not check(Claim([0], 9), Claim([], 9, num_new=2))
    assert check(Claim([0], 9, num_new=8), Claim([1], 9))


def test_full_pool_and_full_slots_leave_one_place_to_exchange() -> None:
    assert check(Claim([0, 1], 2), Claim([2], 1), num_blocks=3)
    assert not check(Claim([0, 1], 2), Claim([2, 3], 2), num_blocks=3, num_host_slots=1)
