"""What a process says of itself: its own checks in words, and what the kernel counts for it."""

from __future__ import annotations

import mmap
import os
import socket
from collections import Counter
from collections.abc import Callable

from cluster import wire
from cluster.books import ClusterBooks, ProcessBooks, faults_of, request_ids
from cluster.process_state import ProcessState, process_name


def raising(error: Exception) -> Callable[[], None]:
    def check() -> None:
        raise error

    return check


def test_each_check_that_fails_is_a_fault_in_words() -> None:
    one = 1

    def wordless() -> None:
        assert one == 2

    faults = faults_of(lambda: None, raising(AssertionError("block 7 is free twice")), wordless, raising(AssertionError("x" * 10_000)))
    assert faults[0] == "block 7 is free twice"
    assert "one == 2" in faults[1] or "1 == 2" in faults[1]  # as the source has it, or as pytest rewrites it
    assert len(faults[2]) == 500
    assert len(faults) == 3


def test_other_errors_of_a_check_are_bugs_and_pass() -> None:
    try:
        faults_of(raising(KeyError("a bug")))
    except KeyError:
        return
    raise AssertionError("it was taken for a fault")


def test_requests_are_told_by_id_whichever_attempt() -> None:
    assert request_ids(["b/1", "a/b/0", "b/0"]) == ("a/b", "b")


def test_open_files_are_told_by_kind() -> None:
    before = Counter(ProcessState.now().open_files)
    reader, writer = os.pipe()
    with socket.socket():
        more = Counter(ProcessState.now().open_files) - before
    os.close(reader)
    os.close(writer)
    assert more == {"pipe": 2, "socket": 1}
    assert Counter(ProcessState.now().open_files) == before


def test_a_segment_has_one_name_open_or_mapped_until_it_is_neither() -> None:
    before = ProcessState.now().segments
    fd = os.memfd_create("some pool")
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    [name] = ProcessState.now().segments.keys() - before.keys()
    assert name.startswith("some pool:")
    assert ProcessState.now().open_files["memfd:some pool"] == 1
    with mmap.mmap(fd, 3 * mmap.PAGESIZE):
        os.close(fd)
        assert ProcessState.now().segments[name] == 3 * mmap.PAGESIZE
    assert ProcessState.now().segments == before


def test_the_process_is_this_one() -> None:
    state = ProcessState.now()
    assert process_name() == f"{socket.gethostname()}-{os.getpid()}"
    assert state.rss_bytes > 2**20
    assert state.num_threads >= 1
    assert sum(state.open_files.values()) < state.max_open_files


def test_books_cross_a_wire_unchanged() -> None:
    books = ProcessBooks("decode", "life", {"blocks_owned": 1}, faults=("wrong",), requests=("r",), peers=("p",), is_busy=True)
    assert wire.decode(ProcessBooks, wire.encode(books)) == books
    assert wire.validated(ClusterBooks, {"processes": [], "missing": {"Decode": "gone"}}) == ClusterBooks((), {"Decode": "gone"})
