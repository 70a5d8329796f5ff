"""What NCCL makes of blocks: a rank sends them to itself, beside one large send and a bare copy of as many bytes.

On one device nothing crosses a link, so this is the cost of NCCL itself, of its groups and of our calls; not the speed of a wire.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cluster.kv_transfer.nccl_device import GROUP_BYTES, MAX_GROUP_ROWS, Communicator, Device, Rows

BLOCK_BYTES: Final = (64 * 2**10, 737_280, 4 * 2**20)  # a small one, SmolLM2's of 32 tokens, one of an 8B model
READ_BYTES: Final = (16 * 2**20, 128 * 2**20, 1024 * 2**20)
_DEADLINE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One size of blocks and of a read. GB/s count each byte once."""

    block_bytes: int
    num_blocks: int
    us_per_block: float
    blocks_gb_s: float  # groups of blocks, as the plane posts them
    one_send_gb_s: float  # one send of as many bytes
    copy_gb_s: float  # one copy of as many bytes, by torch

    @property
    def of_copy(self) -> float:
        """Share of the bare copy."""
        return self.blocks_gb_s / self.copy_gb_s


def measure(device: Device, memory: torch.device, repeats: int, *, blocks: Sequence[int], reads: Sequence[int]) -> Iterator[Figure]:
    """Medians of `repeats`, after one that does not count, for blocks and reads of all these bytes; the three kinds take turns.

    Args:
        device: with NCCL.
        memory: the device's, to torch.
        repeats: for each figure.
        blocks: bytes of a block.
        reads: bytes of a read; rounded down to whole blocks.
    """
    communicator = device.join(device.unique_id(), 0, 1)
    try:
        for block_bytes in blocks:
            for read_bytes in reads:
                yield _figure(communicator, memory, repeats, block_bytes, max(1, read_bytes // block_bytes))
    finally:
        communicator.abort()


def _figure(communicator: Communicator, memory: torch.device, repeats: int, block_bytes: int, num_blocks: int) -> Figure:
    source = torch.full((num_blocks, block_bytes), 1, dtype=torch.uint8, device=memory)
    destination = torch.zeros_like(source)
    order, places = (random.Random(seed).sample(range(num_blocks), num_blocks) for seed in (1, 2))
    kinds: dict[str, Callable[[], object]] = {
        "blocks": lambda: _send(communicator, Rows(source, order), Rows(destination, places)),
        "one send": lambda: _send(communicator, Rows(source.view(1, -1), [0]), Rows(destination.view(1, -1), [0])),
        "copy": lambda: destination.copy_(source),
    }
    times_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats + 1):
        for kind, run in kinds.items():
            times_s[kind].append(_time_s(run, destination))
            if not bool(destination.all()):
                raise RuntimeError(f"bytes of {kind} did not arrive")
    median_s = {kind: statistics.median(found[1:]) for kind, found in times_s.items()}
    rates = [source.numel() / median_s[kind] / 1e9 for kind in kinds]
    return Figure(block_bytes, num_blocks, median_s["blocks"] / num_blocks * 1e6, *rates)


def _time_s(run: Callable[[], object], destination: torch.Tensor) -> float:
    destination.zero_()
    settle(destination.device)
    started_s = time.perf_counter()
    run()
    settle(destination.device)
    return time.perf_counter() - started_s


def settle(memory: torch.device) -> None:
    """Returns when the device has done all that it was asked for."""
    if memory.type == "cuda":
        torch.cuda.synchronize(memory)


def _send(communicator: Communicator, source: Rows, destination: Rows) -> None:
    """In groups of the plane's size."""
    step = min(MAX_GROUP_ROWS, max(1, GROUP_BYTES // source.tensor.shape[1]))
    groups = [
        communicator.post(
            send=Rows(source.tensor, source.indexes[start : start + step]),
            receive=Rows(destination.tensor, destination.indexes[start : start + step]),
        )
        for start in range(0, len(source.indexes), step)
    ]
    started_s = time.monotonic()
    while not communicator.is_done(groups[-1]):
        if time.monotonic() - started_s > _DEADLINE_S:
            raise RuntimeError("NCCL does not end a group")
