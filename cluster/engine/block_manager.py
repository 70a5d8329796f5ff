"""Who holds which block (promise P2). Pure bookkeeping: the moves of bytes that follow from it are returned, never made.

Blocks are free, cached (evictable), owned by live sequences (ref counted), or leased under a request's key. A sequence's table:

    allocate / fork ──► table ──grow, make_writable──► table ──free──► gone
                          │ ▲                            └────lease──► lease ──release──► gone
                  suspend │ │ resume
                          ▼ │
                        suspended: move_out gives blocks up for host slots, move_in brings them back

Ids below `num_blocks` are blocks, ids from there on host slots, so that a table of a suspended sequence may name both. A block moves
out once all its holders are suspended, and for all of them at once: every move out frees exactly one block and fills one slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.engine.block_pool import BlockPool
from cluster.kv_ticket import BlockRef


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy the content of `source` to `target`. Moves are to be made in the order they were returned, before the next step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the four add up to the pool. `num_away` are host slots in use."""

    num_free: int
    num_cached: int
    num_owned: int
    num_leased: int
    num_away: int


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """What an allocation would take: the blocks of a prefix hit, and new ones. Valid until the manager changes."""

    hit_block_ids: tuple[int, ...]
    num_new_blocks: int
    num_taken: int  # of the available blocks: the new ones and the hits that are merely cached


class BlockManager:
    """Tables and leases over a `BlockPool`, and the host slots of suspended sequences."""

    def __init__(self, num_blocks: int, num_host_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_slots = num_host_slots
        self._pool = BlockPool(num_blocks)
        self._slots = BlockPool(num_host_slots)
        self._tables: dict[str, list[int]] = {}
        self._leases: dict[str, list[int]] = {}
        self._suspended: set[str] = set()

    # ---- what there is -------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return self._pool.num_available

    @property
    def num_live(self) -> int:
        """Blocks and host slots that live sequences or leases hold."""
        return self.num_blocks - self._pool.num_available + self.num_host_slots - self._slots.num_available

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_available

    def holds(self, key: str) -> bool:
        """Whether a sequence or a lease has blocks under `key`."""
        return key in self._tables or key in self._leases

    @property
    def table_keys(self) -> set[str]:
        return set(self._tables)

    @property
    def leased_keys(self) -> tuple[str, ...]:
        return tuple(self._leases)

    def refs(self, key: str) -> tuple[BlockRef, ...]:
        """The blocks of a table or lease with their generations, in order."""
        block_ids = self._tables[key] if key in self._tables else self._leases[key]
        return tuple(BlockRef(block_id, self._pool.generation(block_id)) for block_id in block_ids)

    def counts(self) -> BlockCounts:
        leased_refs = Counter(block_id for block_ids in self._leases.values() for block_id in block_ids)
        num_leased = sum(self._pool.ref_counts[block_id] == count for block_id, count in leased_refs.items())
        num_free, num_cached = self._pool.num_free, self._pool.num_cached
        num_owned = self.num_blocks - num_free - num_cached - num_leased
        return BlockCounts(num_free, num_cached, num_owned, num_leased, self.num_host_slots - self._slots.num_available)

    # ---- tables --------------------------------------------------------------------------------------------------------

    def plan(self, prefix_keys: Sequence[bytes], num_blocks: int) -> AllocationPlan:
        """What `allocate` would take for `num_blocks` whose first ones may be found under `prefix_keys`."""
        hits: list[int] = []
        for key in prefix_keys[:num_blocks]:
            block_id = self._pool.find(key)
            if block_id is None:
                break
            hits.append(block_id)
        num_new = num_blocks - len(hits)
        return AllocationPlan(tuple(hits), num_new, num_new + sum(map(self._pool.is_cached, hits)))

    def allocate(self, key: str, plan: AllocationPlan) -> list[int]:
        """Makes the table that `plan` describes: the hits, then new blocks. `plan.num_taken` blocks must be available."""
        assert not self.holds(key), f"{key} holds blocks already"
        for block_id in plan.hit_block_ids:
            self._pool.share(block_id)
        table = [*plan.hit_block_ids, *(self._pool.take() for _ in range(plan.num_new_blocks))]
        self._tables[key] = table
        return table

    def grow(self, key: str, num_blocks: int) -> None:
        """Adds new blocks at the end of the table. They must be available."""
        self._tables[key].extend(self._pool.take() for _ in range(num_blocks))

    def fork(self, key: str, new_key: str) -> list[int]:
        """A second table with the same blocks, all shared."""
        assert not self.holds(new_key), f"{new_key} holds blocks already"
        assert key not in self._suspended, f"{key} is suspended"
        table = list(self._tables[key])
        for block_id in table:
            self._pool.share(block_id)
        self._tables[new_key] = table
        return table

    def num_shared(self, key: str, first: int, end: int) -> int:
        """How many blocks `make_writable` would take."""
        return sum(self._pool.ref_counts[block_id] > 1 for block_id in self._tables[key][first:end])

    def make_writable(self, key: str, first: int, end: int) -> list[BlockMove]:
        """Copy-on-write: replaces the shared ones of the table's blocks `[first, end)` by copies of its own."""
        table = self._tables[key]
        moves = []
        for index in range(first, min(end, len(table))):
            shared = table[index]
            if self._pool.ref_counts[shared] > 1:
                table[index] = self._pool.take()
                self._pool.drop(shared)
                moves.append(BlockMove(shared, table[index]))
            else:
                assert not self._pool.has_key(shared), f"block {shared} is final: its content has a prefix key"
        return moves

    def register(self, key: str, first: int, prefix_keys: Sequence[bytes]) -> None:
        """The table's blocks from `first` on are full and computed: later prompts may share them under `prefix_keys`."""
        table = self._tables[key]
        for index, prefix_key in enumerate(prefix_keys, start=first):
            self._pool.register(table[index], prefix_key)

    def free(self, key: str) -> None:
        """Gives back a table's blocks and slots. Nothing happens when there is no table."""
        self._suspended.discard(key)
        self._drop(self._tables.pop(key, ()))

    def forget_cached(self) -> int:
        """Frees every cached block, so that no prefix hit finds them; returns how many."""
        return self._pool.drop_cached()

    # ---- leases --------------------------------------------------------------------------------------------------------

    def lease(self, key: str) -> None:
        """Hands a sequence's blocks over to a lease under the same key."""
        assert key not in self._suspended, f"{key} is suspended"
        self._leases[key] = list(self._tables.pop(key))

    def release(self, key: str) -> bool:
        """Ends a lease; False when there is none (any more)."""
        block_ids = self._leases.pop(key, None)
        if block_ids is None:
            return False
        self._drop(block_ids)
        return True

    # ---- suspended sequences -------------------------------------------------------------------------------------------

    def suspend(self, key: str) -> None:
        """The sequence does not run until `resume`: its blocks may move out."""
        assert key in self._tables
        self._suspended.add(key)

    def resume(self, key: str) -> None:
        """The sequence runs again; all its blocks must be here."""
        assert self.num_away(key) == 0, f"{key} has blocks away"
        self._suspended.discard(key)

    def num_away(self, key: str) -> int:
        """How many of the table's blocks are in host slots."""
        return sum(entry >= self.num_blocks for entry in self._tables[key])

    def move_out(self, key: str, num_blocks: int, *, keep: str | None = None) -> list[BlockMove]:
        """Moves up to `num_blocks` blocks of a suspended sequence to host slots, last ones first, as far as slots and sharers allow.

        None of `keep` moves, for which room is made: it may be suspended and share some.
        """
        assert key in self._suspended, f"{key} runs"
        holders = Counter(entry for other in self._suspended if other != keep for entry in self._tables[other])
        moves: list[BlockMove] = []
        for block_id in reversed(self._tables[key]):
            if len(moves) == num_blocks or self._slots.num_available == 0:
                break
            if block_id < self.num_blocks and self._pool.ref_counts[block_id] == holders[block_id]:
                moves.append(self._replace(block_id, self.num_blocks + self._slots.take()))
        return moves

    def move_in(self, key: str, num_blocks: int) -> list[BlockMove]:
        """Brings up to `num_blocks` of the table's blocks back from their slots. They must be available."""
        away = [entry for entry in self._tables[key] if entry >= self.num_blocks]
        return [self._replace(slot, self._pool.take()) for slot in away[:num_blocks]]

    def _replace(self, source: int, target: int) -> BlockMove:
        """Lets every suspended table name `target`, which has one reference, in place of `source`, which no other table names."""
        num_holders = 0
        for key in self._suspended:
            table = self._tables[key]
            for index, entry in enumerate(table):
                if entry == source:
                    table[index] = target
                    num_holders += 1
        for _ in range(num_holders - 1):
            self._share(target)
        self._drop([source] * num_holders)
        return BlockMove(source, target)

    def _share(self, entry: int) -> None:
        if entry < self.num_blocks:
            self._pool.share(entry)
        else:
            self._slots.share(entry - self.num_blocks)

    def _drop(self, entries: Iterable[int]) -> None:
        for entry in reversed(list(entries)):  # the end of a prefix is evicted before its beginning
            if entry < self.num_blocks:
                self._pool.drop(entry)
            else:
                self._slots.drop(entry - self.num_blocks)

    # ---- proof ---------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block has one state and its ref count equals the tables and leases that name it."""
        self._pool.check_integrity()
        self._slots.check_integrity()
        assert not self._tables.keys() & self._leases.keys(), "a key holds both a table and a lease"
        assert self._suspended <= self._tables.keys(), "a suspended key has no table"
        named = Counter(entry for entries in (*self._tables.values(), *self._leases.values()) for entry in entries)
        refs = {i: n for i, n in enumerate(self._pool.ref_counts) if n}
        refs.update({self.num_blocks + i: n for i, n in enumerate(self._slots.ref_counts) if n})
        wrong = [
            f"{i} has {refs.get(i, 0)} references and {named[i]} holders" for i in sorted(refs.keys() | named) if refs.get(i, 0) != named[i]
        ]
        assert not wrong, f"of the blocks and slots, {', '.join(wrong)}"
        for key in self._tables.keys() - self._suspended:
            assert self.num_away(key) == 0, f"{key} runs with blocks away"
        counts = self.counts()
        assert counts.num_free + counts.num_cached + counts.num_owned + counts.num_leased == self.num_blocks, f"{counts} do not add up"
