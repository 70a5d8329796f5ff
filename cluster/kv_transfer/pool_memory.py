"""Memory of a KV pool that other processes of the host may map: an anonymous memfd, so the kernel frees it after a kill -9.

The file, in pages:

    [ the pool's bytes ........ ][ one page that starts with the token ]

The token is drawn for each pool. A reader that finds it in its mapping has mapped that pool and no other.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import warnings
from typing import Final

import torch

from cluster.books import POOL_MEMFD
from cluster.errors import ConfigError, PlaneUnavailable
from cluster.host_memory import available_bytes

TOKEN_BYTES: Final = 32
_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not in `fcntl` before Python 3.15
_NO_SHRINK: Final = fcntl.F_SEAL_SHRINK
_SEALS: Final = fcntl.F_SEAL_GROW | _NO_SHRINK | _F_SEAL_FUTURE_WRITE


def _pool_pages_bytes(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PoolMemory:
    """One pool's memory and the descriptor that shares it."""

    def __init__(self) -> None:
        self.token: Final = secrets.token_bytes(TOKEN_BYTES)
        self.num_bytes = 0
        self._fd: int | None = None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed, resident memory: uint8 `[num_bytes]`. It lives as long as the tensor; once a `PoolMemory`.

        Raises:
            ConfigError: the machine has no such memory left.
        """
        assert self._fd is None, "a PoolMemory holds one pool"
        size = _pool_pages_bytes(num_bytes) + mmap.PAGESIZE
        if size > available_bytes():  # a memfd has no limit of its own: the kernel would kill processes to fill it
            raise ConfigError(f"cannot allocate {num_bytes} bytes, {available_bytes()} are available", param="kv_cache_bytes")
        self._fd = os.memfd_create(POOL_MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, size)  # fails here, where a page fault later would be a SIGBUS
            memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot allocate {num_bytes} bytes: {error.strerror}", param="kv_cache_bytes") from error
        memory[-mmap.PAGESIZE : -mmap.PAGESIZE + TOKEN_BYTES] = self.token
        self.num_bytes = num_bytes
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)

    def share(self) -> int:
        """The descriptor to hand out, valid until `close`. From now on the file keeps its size and nobody else can map it writable.

        Raises:
            PlaneUnavailable: nothing was allocated, or the kernel cannot seal it.
        """
        if self._fd is None:
            raise PlaneUnavailable("the pool was not allocated in shared memory")
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise PlaneUnavailable(f"the kernel cannot seal shared memory: {error.strerror}") from error
        return self._fd

    def close(self) -> None:
        """Ends sharing; the tensor stays good. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def map_pool(fd: int, num_bytes: int, token: bytes) -> torch.Tensor:
    """A peer's pool, read-only: uint8 `[num_bytes]`, unmapped with the last reference to it. Writing to it is a SIGSEGV.

    Raises:
        PlaneUnavailable: `fd` is not the pool that `token` names, or cannot be mapped.
    """
    size = _pool_pages_bytes(num_bytes) + mmap.PAGESIZE
    try:
        if os.fstat(fd).st_size != size or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NO_SHRINK:
            raise PlaneUnavailable("the peer's shared memory is not what it described")
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise PlaneUnavailable(f"the peer's shared memory cannot be mapped: {error.strerror}") from error
    if not hmac.compare_digest(memory[-mmap.PAGESIZE : -mmap.PAGESIZE + TOKEN_BYTES], token):
        raise PlaneUnavailable("the peer's shared memory holds another token")
    with warnings.catch_warnings():  # torch has no read-only tensors and says so
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
