"""Host memory for the KV of preempted sequences, and the one place that makes the block manager's moves real."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch

from cluster.engine.block_manager import BlockMove
from cluster.engine.kv_cache import KVCache
from cluster.errors import ConfigError


class SwapSpace:
    """`num_slots` blocks in host memory beside a pool. Slot `i` has the id `num_blocks + i`."""

    def __init__(self, kv_cache: KVCache, num_slots: int) -> None:
        """Raises:
        ConfigError: the system does not give so much memory.
        """
        self._kv_cache = kv_cache
        self._num_blocks = kv_cache.storage.shape[0]
        try:  # the system commits a page when it is first written, so an unused swap space costs nothing
            self._storage = torch.empty((num_slots, kv_cache.storage.shape[1]), dtype=torch.uint8)
        except RuntimeError as error:
            raise ConfigError(f"swap_bytes: cannot allocate {num_slots} blocks of host memory", param="swap_bytes") from error

    def apply(self, moves: Iterable[BlockMove]) -> None:
        """Makes `moves` in order, neighbours of one kind at once."""
        for (from_host, to_host), group in groupby(moves, key=self._kind):
            run = list(group)
            sources, targets = [move.source for move in run], [move.target for move in run]
            if to_host:
                self._storage[self._rows(targets)] = self._kv_cache.read_blocks(sources)
            elif from_host:
                self._kv_cache.write_blocks(targets, self._storage[self._rows(sources)])
            else:
                for source, target in zip(sources, targets, strict=True):
                    self._kv_cache.copy_block(source, target)

    def _kind(self, move: BlockMove) -> tuple[bool, bool]:
        return move.source >= self._num_blocks, move.target >= self._num_blocks

    def _rows(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor([slot - self._num_blocks for slot in slots], dtype=torch.int64)
