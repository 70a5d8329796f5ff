"""How fast KV blocks come over each data plane, between two processes of this machine: `python -m benchmarks.kv_transfer`.

Every read is followed by a bare copy of as many bytes, and by NIXL with a bare READ of the same blocks, because on a busy machine only
ratios mean something. `UCX_TLS=tcp` makes NIXL use sockets, as between hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Final

import torch

from cluster import rpc, wire
from cluster.config import PlaneName
from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.kv_transfer import nixl_library
from cluster.kv_transfer.base import Progress
from cluster.kv_transfer.nixl_reader import NixlPool, NixlReader
from cluster.kv_transfer.peers import Peers
from cluster.kv_transfer.pool_memory import PoolMemory
from cluster.kv_transfer.selection import PlaneContext, publish, select_planes
from cluster.kv_transfer.service import KVService

PLANES: Final[tuple[PlaneName, ...]] = ("shared_memory", "nixl", "grpc")
HOST: Final = "127.0.0.1"
LAYOUTS: Final = {
    "64 KiB": KVLayout(num_layers=2, num_kv_heads=2, head_dim=128, block_size=32, kv_dtype="bf16"),
    "720 KiB": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32, kv_dtype="bf16"),
    "1.4 MiB": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=64, kv_dtype="bf16"),
}
READ_BYTES: Final = 64 * 2**20
POOL_BYTES: Final = 256 * 2**20
SECRET: Final = "benchmark"


class OpenHouse:
    """Leases that never end."""

    def check(self, ticket: KVTicket, num_blocks: int) -> None: ...

    def follow(self, key: str, nonce: bytes) -> AsyncGenerator[Progress, None]:
        raise NotImplementedError("complete tickets are not followed")

    def renew(self, key: str, nonce: bytes) -> float | None:
        return 1e9

    def release(self, key: str, nonce: bytes, digest: bytes, taker: str) -> bool:
        return True


def random_blocks(layout: KVLayout, seed: int) -> list[int]:
    """Blocks of a pool that make up one read, in random order."""
    return random.Random(seed).sample(range(POOL_BYTES // layout.block_bytes), READ_BYTES // layout.block_bytes)


async def own(plane: PlaneName, layout: KVLayout) -> None:
    """Serves a pool and prints a ticket for it, until stdin ends."""
    memory = PoolMemory()
    num_blocks = POOL_BYTES // layout.block_bytes
    pool = memory.allocate(num_blocks * layout.block_bytes).view(num_blocks, layout.block_bytes).fill_(1)
    incarnation = secrets.token_hex(8)
    planes = select_planes([plane], PlaneContext(pool, incarnation, HOST, SECRET, memory))
    published = await publish(planes)
    server = rpc.server(SECRET)
    KVService(incarnation=incarnation, layout=layout, checkpoint="", domain="", pool=pool, planes=published, checker=OpenHouse()).register(
        server
    )
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    blocks = tuple(BlockRef(block_id, 0) for block_id in random_blocks(layout, 0))
    num_tokens = len(blocks) * layout.block_size
    ticket = KVTicket("benchmark", 0, bytes(16), incarnation, endpoint, blocks, num_tokens, layout, "", "", 1e9)
    print(wire.encode(ticket).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    for each in planes:
        await each.close()


async def measure(plane: PlaneName, name: str, repeats: int) -> None:
    """One line of the table."""
    layout = LAYOUTS[name]
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "benchmarks.kv_transfer", "--own", plane, name)
    owner = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert owner.stdout is not None
    ticket = wire.decode(KVTicket, bytes.fromhex((await owner.stdout.readline()).decode()))
    pool = torch.zeros(POOL_BYTES // layout.block_bytes, layout.block_bytes, dtype=torch.uint8).fill_(2)
    planes = select_planes([plane], PlaneContext(pool, "the reader", HOST, SECRET))
    peers = Peers(planes, layout=layout, checkpoint="", secret=SECRET)
    read, copy, bare = map(statistics.median, await read_and_copy(peers, ticket, pool, repeats))
    ratio = f"{bare:10.2f} {read / bare:6.0%}" if bare else ""
    print(f"{plane:14s} {name:>8s} {read:8.2f} {copy:10.2f} {read / copy:6.0%} {ratio}", flush=True)
    await peers.close()
    for each in planes:
        await each.close()
    owner.kill()
    await owner.wait()


async def read_and_copy(peers: Peers, ticket: KVTicket, pool: torch.Tensor, repeats: int) -> tuple[list[float], ...]:
    """GB/s of each read, of the bare copy after it and of the bare READ after that (0 for other planes than NIXL)."""
    peer = await peers.get(ticket)
    indexes = range(len(ticket.blocks))
    block_ids = random_blocks(peer.description.layout, 1)
    num_bytes = len(indexes) * pool.shape[1]
    source, copied = pool.view(-1)[:num_bytes], torch.zeros(num_bytes, dtype=torch.uint8).fill_(3)
    bare = BareRead(peer.description.planes["nixl"], pool) if peer.plane == "nixl" else None
    rates: tuple[list[float], ...] = ([], [], [])
    for _ in range(repeats + 1):
        times_s = [time.perf_counter()]
        await peer.read(ticket, indexes, pool, block_ids)
        times_s.append(time.perf_counter())
        copied.copy_(source)
        times_s.append(time.perf_counter())
        if bare is not None:
            bare.read([block.block_id for block in ticket.blocks], block_ids)
        times_s.append(time.perf_counter())
        for found, (before, after) in zip(rates, pairwise(times_s), strict=True):
            found.append(num_bytes / (after - before) / 1e9)
    if bare is None:
        return rates[0][1:], rates[1][1:], [0.0]
    bare.close()
    return tuple(found[1:] for found in rates)  # the first read maps pages and opens connections


class BareRead:
    """NIXL without a plane: one READ of everything, on an agent of its own, asked for without a pause."""

    def __init__(self, description: bytes, pool: torch.Tensor) -> None:
        """`description` is what the peer's plane published, `pool` what is read into."""
        self._reader = NixlReader(nixl_library.load(HOST), pool)
        self._pool = pool
        self._source = self._reader.open(wire.decode(NixlPool, description))

    def read(self, rows: Sequence[int], block_ids: Sequence[int]) -> None:
        """Blocks of the peer into rows of the pool."""
        number = self._reader.post_blocks(self._source, rows, self._pool, block_ids)
        while not self._reader.is_done(number):
            pass

    def close(self) -> None:
        self._reader.close()


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=PLANES)
    parser.add_argument("--own", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own is not None:
        asyncio.run(own(args.own[0], LAYOUTS[args.own[1]]))
        return
    print(f"GB/s, reads of {READ_BYTES >> 20} MiB; medians of {args.repeats}")
    print(f"{'plane':14s} {'block':>8s} {'read':>8s} {'bare copy':>10s} {'ratio':>6s} {'bare READ':>10s} {'ratio':>6s}")
    for plane in args.planes:
        for name in LAYOUTS:
            asyncio.run(measure(plane, name, args.repeats))


if __name__ == "__main__":
    main()
