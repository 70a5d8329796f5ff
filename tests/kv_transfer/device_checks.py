"""What a device of the NCCL plane must do with one rank that sends to itself: checked of the sockets here, and of cupy where one is."""

from __future__ import annotations

import time
from typing import Final

import pytest
import torch

from cluster.errors import TransferError
from cluster.kv_transfer.nccl_device import MAX_GROUP_ROWS, Communicator, Device, Rows

# (rows, bytes of a row): one byte, odd sizes, a SmolLM2 block, a block of an 8B model, as many rows as a group may have
SIZES: Final = ((1, 1), (3, 17), (7, 65_537), (5, 737_280), (3, 4 * 2**20), (MAX_GROUP_ROWS, 4096))
_DEADLINE_S: Final = 30.0


def join_alone(device: Device) -> Communicator:
    """A communicator of one rank."""
    return device.join(device.unique_id(), 0, 1)


def wait(communicator: Communicator, group: object) -> None:
    """Returns when the group is done; fails when that takes too long."""
    started_s = time.monotonic()
    while not communicator.is_done(group):
        assert time.monotonic() - started_s < _DEADLINE_S, "the group does not end"


def random_rows(num_rows: int, row_bytes: int, memory: torch.device) -> torch.Tensor:
    """Bytes from 1 to 255 that the sizes determine: uint8 `[num_rows, row_bytes]`."""
    generator = torch.Generator().manual_seed(num_rows * row_bytes)
    return torch.randint(1, 256, (num_rows, row_bytes), dtype=torch.uint8, generator=generator).to(memory)


def settle(memory: torch.device) -> None:
    """What torch was asked for has happened: NCCL's streams do not wait for torch's."""
    if memory.type == "cuda":
        torch.cuda.synchronize(memory)


def check_rows_arrive(device: Device, memory: torch.device, num_rows: int, row_bytes: int) -> None:
    """Every row where it belongs, whatever the order, and no other row."""
    communicator = join_alone(device)
    source = random_rows(num_rows, row_bytes, memory)
    destination = torch.zeros(num_rows + 2, row_bytes, dtype=torch.uint8, device=memory)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).tolist()
    settle(memory)
    group = communicator.post(send=Rows(source, order), receive=Rows(destination, range(1, num_rows + 1)))
    wait(communicator, group)
    assert torch.equal(destination[1:-1], source[order])
    assert not destination[0].any() and not destination[-1].any()
    communicator.abort()


def check_groups_go_in_order(device: Device, memory: torch.device) -> None:
    """The last of many groups into the same rows is the one that stays, and when it is done all are."""
    communicator = join_alone(device)
    sources = [random_rows(4, 100_000 + number, memory)[:, :100_000].contiguous() for number in range(10)]
    destination = torch.zeros(4, 100_000, dtype=torch.uint8, device=memory)
    settle(memory)
    groups = [communicator.post(send=Rows(source, range(4)), receive=Rows(destination, range(4))) for source in sources]
    wait(communicator, groups[-1])
    assert all(communicator.is_done(group) for group in groups)
    assert torch.equal(destination, sources[-1])
    communicator.abort()


def check_nothing_is_written_after_an_abort(device: Device, memory: torch.device) -> None:
    """An abort with groups on their way; the communicator is no more, another one works."""
    communicator = join_alone(device)
    source = random_rows(64, 2**20, memory)
    destination = torch.zeros(64, 2**20, dtype=torch.uint8, device=memory)
    settle(memory)
    rows = range(64)
    groups = [communicator.post(send=Rows(source, rows), receive=Rows(destination, rows)) for _ in range(8)]
    communicator.abort()
    communicator.abort()
    destination.fill_(0)
    settle(memory)
    time.sleep(0.2)
    assert not destination.any()
    with pytest.raises(TransferError, match="was aborted"):
        communicator.is_done(groups[-1])
    with pytest.raises(TransferError, match="was aborted"):
        communicator.post(send=Rows(source, rows))
    check_rows_arrive(device, memory, 2, 1000)
