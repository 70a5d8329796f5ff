"""Memory on huge pages: weights and KV are read at every step, and with small pages a third of the bandwidth is lost."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

_PAGE_BYTES: Final = 2 << 20
_ALIGNMENT: Final = 64
# Address space only: pages are taken when they are first written.
_CHUNK_BYTES: Final = 64 << 20


class _Arena:
    """Cuts tensors from large mappings, so that small weights share pages. A mapping goes when its last tensor does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 `[num_bytes]`, zeroed."""
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if taken > _CHUNK_BYTES // 4:
                return _map(taken)[:num_bytes]
            if taken > self._rest.numel():
                self._rest = _map(_CHUNK_BYTES)
            result, self._rest = self._rest[:num_bytes], self._rest[taken:]
            return result


def _map(num_bytes: int) -> Tensor:
    length = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # a mapping outlives the mode of whoever needed it first
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        return whole[-whole.data_ptr() % _PAGE_BYTES :][:num_bytes]


_ARENA: Final = _Arena()


def huge_page_zeros(num_bytes: int) -> Tensor:
    """uint8 `[num_bytes]` on huge pages where the system has them, 64-byte aligned, zeroed.

    Raises:
        ValueError: `num_bytes` is negative.
    """
    if num_bytes < 0:
        raise ValueError(f"num_bytes: {num_bytes} is negative")
    return _ARENA.take(num_bytes)
