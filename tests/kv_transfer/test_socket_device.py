"""The stand-in for a device keeps the rules that it is there for."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from cluster.errors import TransferError
from cluster.kv_transfer.nccl_device import Rows
from tests.kv_transfer.device_checks import (
    SIZES,
    check_groups_go_in_order,
    check_nothing_is_written_after_an_abort,
    check_rows_arrive,
    random_rows,
    wait,
)
from tests.kv_transfer.socket_device import SocketCommunicator, SocketDevice

CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_rows", "row_bytes"), SIZES)
def test_rows_arrive(num_rows: int, row_bytes: int) -> None:
    check_rows_arrive(SocketDevice(), CPU, num_rows, row_bytes)


def test_groups_go_in_order() -> None:
    check_groups_go_in_order(SocketDevice(), CPU)


def test_nothing_is_written_after_an_abort() -> None:
    check_nothing_is_written_after_an_abort(SocketDevice(), CPU)


@pytest.fixture
def ranks() -> list[SocketCommunicator]:
    device, found = SocketDevice(), list[SocketCommunicator]()
    unique_id = device.unique_id()
    joining = threading.Thread(target=lambda: found.append(device.join(unique_id, 0)))
    joining.start()
    time.sleep(0.05)
    assert joining.is_alive(), "a join waits for the other rank"
    found.insert(0, SocketDevice().join(unique_id, 1))
    joining.join()
    return found


def test_the_first_group_waits_for_the_other_rank(ranks: list[SocketCommunicator]) -> None:
    source, destination = random_rows(2, 100, CPU), torch.zeros(2, 100, dtype=torch.uint8)
    posting = threading.Thread(target=lambda: wait(ranks[0], ranks[0].post(send=Rows(source, [0, 1]))))
    posting.start()
    time.sleep(0.05)
    assert posting.is_alive()
    wait(ranks[1], ranks[1].post(receive=Rows(destination, [1, 0])))
    posting.join()
    assert torch.equal(destination.flip(0), source)
    for rank in ranks:
        rank.abort()


def test_ranks_that_disagree_break(ranks: list[SocketCommunicator]) -> None:
    rows = torch.zeros(3, 10, dtype=torch.uint8)
    failures: list[TransferError] = []

    def send() -> None:
        try:
            ranks[0].post(send=Rows(rows, [0, 1]))
        except TransferError as error:
            failures.append(error)

    posting = threading.Thread(target=send)
    posting.start()
    with pytest.raises(TransferError, match="different groups"):
        ranks[1].post(receive=Rows(rows, [0]))
    posting.join()
    assert len(failures) == 1
    for rank in ranks:
        rank.abort()


def test_an_abort_is_the_end_for_the_other_rank(ranks: list[SocketCommunicator]) -> None:
    ranks[0].abort()
    with pytest.raises(TransferError, match="remote error"):
        ranks[1].post(receive=Rows(torch.zeros(1, 10, dtype=torch.uint8), [0]))
    ranks[1].abort()
