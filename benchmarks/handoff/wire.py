"""What is measured: the wires, and the blocks that go over them."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import Final

from cluster.config import PlaneName
from cluster.kv_layout import KVLayout

HOST: Final = "127.0.0.1"
SECRET: Final = "benchmark"
_MODEL: Final = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32, kv_dtype="bf16")  # SmolLM2-135M, as the demo model


@dataclass(frozen=True, slots=True)
class Wire:
    """A data plane, and by which of UCX's transports NIXL reads on it, or beside it for comparison."""

    name: str
    plane: PlaneName
    ucx_tls: str | None  # None: what UCX finds best, which is shared memory between two processes of a machine

    def prepare_process(self) -> None:
        """Sets what UCX reads when it is loaded, in this process and those it starts."""
        os.environ.pop("UCX_TLS", None)
        if self.ucx_tls is not None:
            os.environ["UCX_TLS"] = self.ucx_tls


_ALL: Final = (
    Wire("shared_memory", "shared_memory", None),
    Wire("nixl", "nixl", None),
    Wire("nixl-tcp", "nixl", "tcp"),
    Wire("grpc", "grpc", "tcp"),
)
WIRES: Final = {wire.name: wire for wire in _ALL}


@dataclass(frozen=True, slots=True)
class Case:
    """Reads of several sizes over one wire, of blocks of one size."""

    wire: Wire
    block_size: int  # tokens
    read_bytes: tuple[int, ...]  # of each read, ascending; rounded down to whole blocks, but at least one
    repeats: int

    @property
    def layout(self) -> KVLayout:
        return replace(_MODEL, block_size=self.block_size)

    @property
    def num_blocks(self) -> int:
        """Of the pools: four times the largest read, so that blocks lie as scattered as in a pool in use."""
        return 4 * self.num_read(self.read_bytes[-1])

    def num_read(self, num_bytes: int) -> int:
        """Blocks in a read of `num_bytes`."""
        return max(1, num_bytes // self.layout.block_bytes)

    def scattered(self, seed: int) -> list[int]:
        """Blocks of a pool for the largest read, in random order."""
        return random.Random(seed).sample(range(self.num_blocks), self.num_read(self.read_bytes[-1]))
