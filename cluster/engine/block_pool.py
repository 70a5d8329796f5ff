"""The blocks of one KV pool by themselves: who may be handed out next, and which hold a known prefix. No sequences, no bytes.

    free ──take──► held (ref count ≥ 1) ──last drop──► free, or cached when the block has a prefix key
                     ▲                                            │
                     └──share (prefix hit)── cached ──take, least recently used first──► held, key forgotten

Every hand-out grows the block's generation, so that a reference to an earlier content can be told from the present one.
"""

from __future__ import annotations

from collections import OrderedDict, deque


class BlockPool:
    """Ref counts, generations and prefix keys of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose content may still serve a prefix hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._cached)

    def generation(self, block_id: int) -> int:
        """How often the block has been handed out."""
        return self._generations[block_id]

    def take(self) -> int:
        """Hands out a block with one reference; evicts a cached one when none is free. There must be one available."""
        block_id = self._free.popleft() if self._free else self._evict()
        self._generations[block_id] += 1
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Adds a reference to a held or cached block."""
        if self.ref_counts[block_id] == 0:
            del self._cached[block_id]
        self.ref_counts[block_id] += 1

    def drop(self, block_id: int) -> None:
        """Takes one reference away."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} dropped once too often"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            if block_id in self._key_of:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def register(self, block_id: int, key: bytes) -> None:
        """Lets later sequences find the block's content. The first block of a key keeps it; a block has one key."""
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def find(self, key: bytes) -> int | None:
        """The block with the content that `key` names."""
        return self._block_of.get(key)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def has_key(self, block_id: int) -> bool:
        return block_id in self._key_of

    def drop_cached(self) -> int:
        """Frees every cached block and returns how many; keys of held blocks stay."""
        dropped = [self._evict() for _ in range(len(self._cached))]
        self._free.extend(dropped)
        return len(dropped)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        return block_id

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is exactly one of free, cached and held, and keys lead both ways."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        held = {block_id for block_id, count in enumerate(self.ref_counts) if count > 0}
        assert not free & cached and not free & held and not cached & held, "a block has two states"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block has no state"
        assert all(count >= 0 for count in self.ref_counts), "a ref count is negative"
        assert cached <= self._key_of.keys() and not free & self._key_of.keys(), "cached means: has a key and no holder"
        assert {key: block_id for block_id, key in self._key_of.items()} == self._block_of, "prefix keys do not lead both ways"
