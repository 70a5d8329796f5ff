"""The mapping probe and the memory behind it. What all planes share is in `tests/contract`."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster import wire
from cluster.errors import ConfigError, PlaneUnavailable, TicketMismatch, TransferError
from cluster.kv_transfer.base import PeerDescription
from cluster.kv_transfer.fd_server import FdServer, receive_fd
from cluster.kv_transfer.pool_memory import PoolMemory, map_pool
from cluster.kv_transfer.shared_memory import PoolDescriptor, SharedMemoryPlane
from tests.kv_transfer.owner import SMALL, random_pool
from tests.kv_transfer.process_state import Held, nothing_beyond, open_files


@pytest.fixture
async def owner() -> AsyncIterator[SharedMemoryPlane]:
    memory = PoolMemory()
    plane = SharedMemoryPlane(memory.allocate(8 * SMALL.block_bytes).view(8, SMALL.block_bytes), memory)
    yield plane
    await plane.close()


def describe(published: bytes) -> PeerDescription:
    return PeerDescription("127.0.0.1:1", "incarnation", SMALL, "checkpoint", "domain", {"shared_memory": published})


async def refusal(published: bytes) -> TransferError:
    reader = SharedMemoryPlane(torch.zeros(8, SMALL.block_bytes, dtype=torch.uint8))
    before = Held.now()
    with pytest.raises((PlaneUnavailable, TicketMismatch)) as caught:
        await reader.connect(describe(published))
    await reader.close()
    await nothing_beyond(before)  # the owner hears of the end a moment later
    return caught.value


async def test_other_host(owner: SharedMemoryPlane) -> None:
    """A name that only exists on another host: the kernel refuses the connection."""
    descriptor = wire.decode(PoolDescriptor, await owner.publish())
    assert "no shared memory of the peer on this host" in str(await refusal(wire.encode(replace(descriptor, socket="baton-kv-elsewhere"))))


async def test_wrong_token(owner: SharedMemoryPlane) -> None:
    descriptor = wire.decode(PoolDescriptor, await owner.publish())
    for token in (b"", bytes(32), descriptor.token[:-1] + b"\0", descriptor.token * 2):
        await refusal(wire.encode(replace(descriptor, token=token or b"\0" * 40)))


async def test_description_that_does_not_fit_the_memory(owner: SharedMemoryPlane) -> None:
    descriptor = wire.decode(PoolDescriptor, await owner.publish())
    for wrong in (replace(descriptor, num_blocks=9000), replace(descriptor, num_blocks=0)):
        assert "not what it described" in str(await refusal(wire.encode(wrong)))
    mismatch = await refusal(wire.encode(replace(descriptor, block_bytes=SMALL.block_bytes + 64)))
    assert isinstance(mismatch, TicketMismatch)
    assert mismatch.param == "layout"


async def test_description_that_is_none(owner: SharedMemoryPlane) -> None:
    await owner.publish()
    assert "no good" in str(await refusal(b"\xc1nonsense"))


async def test_memory_of_another_pool() -> None:
    """The token in the mapping decides, whatever socket the descriptor came from."""
    mine, other = PoolMemory(), PoolMemory()
    pool = mine.allocate(4096)
    other.allocate(4096)
    pool.fill_(3)
    with pytest.raises(PlaneUnavailable, match="another token"):
        map_pool(mine.share(), 4096, other.token)
    assert torch.equal(map_pool(mine.share(), 4096, mine.token), pool)
    mine.close()
    other.close()


def test_descriptor_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "no memory"
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    with path.open("rb") as file, pytest.raises(PlaneUnavailable, match="cannot be mapped"):
        map_pool(file.fileno(), mmap.PAGESIZE, bytes(32))


async def test_unshared_pool() -> None:
    plane = SharedMemoryPlane(torch.zeros(8, SMALL.block_bytes, dtype=torch.uint8))
    with pytest.raises(PlaneUnavailable):
        await plane.publish()
    await plane.close()


def test_shared_memory_keeps_its_size_and_its_writer() -> None:
    memory = PoolMemory()
    pool = memory.allocate(10_000)
    fd = memory.share()
    for size in (0, 2**20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_SHARED)
    pool.fill_(9)  # our own mapping stays writable
    assert bool((map_pool(fd, 10_000, memory.token) == 9).all())
    memory.close()
    memory.close()
    assert int(pool.sum()) == 90_000  # and good after the descriptor is closed


def test_reader_cannot_write() -> None:
    code = """
from cluster.kv_transfer.pool_memory import PoolMemory, map_pool
memory = PoolMemory()
memory.allocate(4096)
map_pool(memory.share(), 4096, memory.token).fill_(1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == -signal.SIGSEGV


def test_memory_that_the_machine_does_not_have() -> None:
    before = open_files()
    with pytest.raises(ConfigError, match="are available") as caught:
        PoolMemory().allocate(2**52)
    assert caught.value.param == "kv_cache_bytes"
    assert open_files() == before


def test_allocation_is_zeroed_and_has_any_size() -> None:
    for num_bytes in (1, 4095, 4096, 4097, 1_000_000):
        memory = PoolMemory()
        pool = memory.allocate(num_bytes)
        assert pool.shape == (num_bytes,)
        assert not pool.any()
        random_pool(pool, seed=num_bytes)  # and does not overlap the token
        assert torch.equal(map_pool(memory.share(), num_bytes, memory.token), pool)
        memory.close()


async def test_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.kv_transfer.fd_server._TIMEOUT_S", 0.05)
    memory = PoolMemory()
    memory.allocate(64)
    server = FdServer(memory.share(), memory.token)
    await server.start()
    before = open_files()
    with pytest.raises(PlaneUnavailable, match="no answer"):
        await receive_fd(server.name, memory.token[:5])  # it waits for the rest of the token
    await asyncio.sleep(0)
    await server.close()
    await server.close()
    memory.close()
    assert len(open_files()) <= len(before)
