"""The cases of the wires, and one of them for real."""

from __future__ import annotations

import os

import pytest

from benchmarks.handoff.reader import Unavailable, measure
from benchmarks.handoff.wire import WIRES, Case, Wire
from cluster.kv_transfer import nixl_library

MIB = 2**20


def test_reads_are_whole_blocks_and_at_least_one() -> None:
    case = Case(WIRES["grpc"], block_size=32, read_bytes=(1, MIB, 16 * MIB), repeats=1)
    assert case.layout.block_bytes == 30 * 2 * 3 * 32 * 64 * 2
    assert [case.num_read(num_bytes) for num_bytes in case.read_bytes] == [1, 1, 22]
    assert case.num_blocks == 4 * 22


def test_blocks_are_scattered_the_same_each_time() -> None:
    case = Case(WIRES["grpc"], block_size=32, read_bytes=(16 * MIB,), repeats=1)
    blocks = case.scattered(seed=0)
    assert blocks == case.scattered(seed=0) != case.scattered(seed=1)
    assert len(set(blocks)) == 22 and max(blocks) < case.num_blocks and blocks != sorted(blocks)


@pytest.mark.parametrize(("name", "tls"), [("nixl-tcp", "tcp"), ("grpc", "tcp"), ("nixl", None), ("shared_memory", None)])
def test_ucx_is_told_what_to_use(name: str, tls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "the user's")
    WIRES[name].prepare_process()
    assert os.environ.get("UCX_TLS") == tls


def test_a_wire_between_two_processes() -> None:
    """The figures are those of this machine, whatever it does meanwhile; their relations are not."""
    [small, large] = measure(Case(WIRES["shared_memory"], block_size=8, read_bytes=(MIB // 2, 4 * MIB), repeats=2))
    assert (small.num_blocks, large.num_blocks) == (2, 22)
    assert len(small.samples) == len(large.samples) == 2
    for reads in (small, large):
        assert reads.gb_per_s > 0 and reads.of_copy > 0 and reads.reader_cpu_share > 0
        assert (reads.of_bare is not None) == nixl_library.is_installed()


def test_a_wire_that_cannot_be_used_says_why() -> None:
    """A plane of UCX, of which UCX has been told to use nothing that there is."""
    if not nixl_library.is_installed():
        pytest.skip("the package nixl is not installed")
    with pytest.raises(Unavailable, match="nixl"):
        measure(Case(Wire("broken", "nixl", "rc"), block_size=8, read_bytes=(MIB // 2,), repeats=1))
