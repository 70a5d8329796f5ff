"""The block manager against a model that knows only contents: a block, once written for a table, reads back the same until freed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from cluster.engine.block_manager import BlockManager, BlockMove

NUM_BLOCKS, NUM_SLOTS = 12, 5


class BlockManagerMachine(RuleBasedStateMachine):
    """`memory` is what the blocks and slots would hold; `expected` what each table or lease must read through its ids.

    A prefix of length n of the "prompt" p has the key and the content (p, n): that is what makes hits checkable.
    """

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, NUM_SLOTS)
        self.memory: dict[int, object] = {}
        self.expected: dict[str, list[object]] = {}
        self.leased: dict[str, list[object]] = {}
        self.lists: dict[str, list[int]] = {}
        self.final: dict[str, int] = {}  # blocks of the table whose content has a key, or came from a hit
        self.suspended: set[str] = set()
        self.handed_out: dict[int, int] = {}
        self.count = 0

    def _new_key(self) -> str:
        self.count += 1
        return f"r{self.count}/0"

    def _apply(self, moves: list[BlockMove]) -> None:
        for move in moves:
            self.memory[move.target] = self.memory[move.source]

    def _fill(self, key: str, index: int, content: object) -> None:
        self.memory[self.lists[key][index]] = content
        self.expected[key][index] = content

    @rule(target=tables, prompt=st.integers(0, 2), num_blocks=st.integers(1, 5), cacheable=st.booleans())
    def allocate(self, prompt: int, num_blocks: int, cacheable: bool) -> str:
        key = self._new_key()
        keys = [bytes([prompt, n]) for n in range(num_blocks)] if cacheable else []
        plan = self.manager.plan(keys, num_blocks)
        if plan.num_taken > self.manager.num_available:
            return key
        before = self.manager.num_available
        self.lists[key] = self.manager.allocate(key, plan)
        assert before - self.manager.num_available == plan.num_taken
        num_hits = len(plan.hit_block_ids)
        self.expected[key] = [(prompt, n) for n in range(num_hits)] + [None] * plan.num_new_blocks
        for index in range(num_hits, num_blocks):
            self._fill(key, index, (prompt, index) if cacheable else (key, index))
        if cacheable:
            self.manager.register(key, num_hits, keys[num_hits:])
        self.final[key] = num_blocks if cacheable else 0
        return key

    @rule(key=tables, num_blocks=st.integers(1, 2))
    def grow(self, key: str, num_blocks: int) -> None:
        if key in self.expected and key not in self.suspended and num_blocks <= self.manager.num_available:
            self.manager.grow(key, num_blocks)
            for _ in range(num_blocks):
                self.expected[key].append(None)
                self._fill(key, len(self.expected[key]) - 1, (key, "grown", self.count))

    @rule(target=tables, key=tables)
    def fork(self, key: str) -> str:
        new_key = self._new_key()
        if key in self.expected and key not in self.suspended:
            self.lists[new_key] = self.manager.fork(key, new_key)
            self.expected[new_key] = list(self.expected[key])
            self.final[new_key] = self.final[key]
        return new_key

    @rule(key=tables, data=st.data())
    def write(self, key: str, data: st.DataObject) -> None:
        if key not in self.expected or key in self.suspended or self.final[key] == len(self.expected[key]):
            return
        first = data.draw(st.integers(self.final[key], len(self.expected[key]) - 1))
        end = data.draw(st.integers(first + 1, len(self.expected[key])))
        if self.manager.num_shared(key, first, end) > self.manager.num_available:
            return
        self._apply(self.manager.make_writable(key, first, end))
        self.read_back()
        self.count += 1
        for index in range(first, end):
            self._fill(key, index, (key, "written", self.count))

    @rule(key=consumes(tables))
    def free(self, key: str) -> None:
        self.manager.free(key)
        self.manager.free(key)
        self.expected.pop(key, None)
        self.suspended.discard(key)

    @rule(key=tables)
    def lease(self, key: str) -> None:
        if key in self.expected and key not in self.suspended:
            self.manager.lease(key)
            self.leased[key] = self.expected.pop(key)

    @rule(key=tables)
    def release(self, key: str) -> None:
        assert self.manager.release(key) == (self.leased.pop(key, None) is not None)

    @rule(key=tables)
    def suspend(self, key: str) -> None:
        if key in self.expected:
            self.manager.suspend(key)
            self.suspended.add(key)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data(), num_blocks=st.integers(1, 4))
    def move_out(self, data: st.DataObject, num_blocks: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.suspended)))
        available, slots = self.manager.num_available, self.manager.num_free_slots
        keep = data.draw(st.sampled_from([None, *sorted(self.suspended - {key})]))
        kept = list(self.lists[keep]) if keep else []
        moves = self.manager.move_out(key, num_blocks, keep=keep)
        assert keep is None or self.lists[keep] == kept
        assert len(moves) <= num_blocks
        assert self.manager.num_available - available == len(moves) == slots - self.manager.num_free_slots
        self._apply(moves)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data())
    def move_in(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.suspended)))
        num_blocks = min(self.manager.num_away(key), self.manager.num_available)
        self._apply(self.manager.move_in(key, num_blocks))
        if self.manager.num_away(key) == 0:
            self.manager.resume(key)
            self.suspended.discard(key)

    @rule()
    def forget_cached(self) -> None:
        num_cached = self.manager.counts().num_cached
        assert self.manager.forget_cached() == num_cached
        assert self.manager.counts().num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.manager.check_integrity()
        live = {i for key in self.expected for i in self.lists[key] if i < NUM_BLOCKS}
        leased = {ref.block_id for key in self.leased for ref in self.manager.refs(key)}
        counts = self.manager.counts()
        assert (counts.num_owned, counts.num_leased) == (len(live), len(leased - live))
        assert counts.num_free + counts.num_cached == NUM_BLOCKS - len(live | leased) == self.manager.num_available

    @invariant()
    def read_back(self) -> None:
        for key, contents in self.expected.items():
            assert [self.memory[entry] for entry in self.lists[key]] == contents
        for key, contents in self.leased.items():
            assert [self.memory[ref.block_id] for ref in self.manager.refs(key)] == contents

    def teardown(self) -> None:
        for key in list(self.expected):
            self.manager.free(key)
        for key in list(self.leased):
            self.manager.release(key)
        self.manager.check_integrity()
        assert self.manager.num_available == NUM_BLOCKS and self.manager.num_free_slots == NUM_SLOTS


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockManagerMachine = BlockManagerMachine.TestCase


def _allocate(manager: BlockManager, key: str, num_blocks: int, keys: list[bytes] | None = None) -> list[int]:
    return manager.allocate(key, manager.plan(keys or [], num_blocks))


def test_generation_grows_at_each_hand_out_and_not_at_a_hit() -> None:
    manager = BlockManager(1)
    _allocate(manager, "a", 1)
    manager.register("a", 0, [b"k"])
    (first,) = manager.refs("a")
    manager.free("a")
    _allocate(manager, "b", 1, [b"k"])
    assert manager.refs("b") == (first,)
    manager.free("b")
    _allocate(manager, "c", 1)
    (second,) = manager.refs("c")
    assert second.block_id == first.block_id and second.generation == first.generation + 1


def test_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    manager = BlockManager(4)
    for name in (b"a", b"b"):
        _allocate(manager, name.decode(), 2)
        manager.register(name.decode(), 0, [name + b"0", name + b"1"])
        manager.free(name.decode())
    _allocate(manager, "hit", 2, [b"a0", b"a1"])  # now b is the older one
    manager.free("hit")
    _allocate(manager, "new", 1)
    assert len(manager.plan([b"b0", b"b1"], 2).hit_block_ids) == 1
    assert len(manager.plan([b"a0", b"a1"], 2).hit_block_ids) == 2


def test_free_blocks_are_taken_before_cached_ones() -> None:
    manager = BlockManager(2)
    _allocate(manager, "a", 1)
    manager.register("a", 0, [b"k"])
    manager.free("a")
    _allocate(manager, "b", 1)
    assert len(manager.plan([b"k"], 1).hit_block_ids) == 1


def test_shared_block_moves_out_only_when_all_its_holders_are_suspended() -> None:
    manager = BlockManager(3, 3)
    _allocate(manager, "a", 3)
    fork = manager.fork("a", "b")
    manager.suspend("a")
    assert manager.move_out("a", 3) == []
    manager.suspend("b")
    assert len(manager.move_out("a", 2)) == 2
    assert manager.num_away("b") == 2 and manager.num_available == 2
    assert all(entry >= 3 for entry in fork[1:]) and fork[0] < 3, "the last blocks go first"
    manager.move_in("b", 2)
    assert manager.num_away("a") == 0, "what comes back comes back for all"
    manager.check_integrity()


def test_integrity_check_finds_a_lost_reference() -> None:
    manager = BlockManager(2)
    table = _allocate(manager, "a", 1)
    table.append(1)
    with pytest.raises(AssertionError, match="1 has 0 references and 1 holders"):
        manager.check_integrity()
