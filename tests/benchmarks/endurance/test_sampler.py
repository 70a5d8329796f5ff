"""What a process holds, against processes that hold known amounts."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.endurance.process_sample import ProcessSample
from benchmarks.endurance.sampler import MAX_SAMPLES, History, Sampler
from deploy.process_tree import process_id

MIB = 2**20
TOLERANCE_BYTES = 4 * MIB

HOLDER = """
import mmap, sys
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
{action}
sys.stdout.write("held\\n"); sys.stdout.flush(); sys.stdin.readline()
"""


@contextmanager
def holder(action: str) -> Iterator[tuple[subprocess.Popen[str], ProcessSample]]:
    """A process that does `action` when it is told, and a sample of it before."""
    command = [sys.executable, "-c", HOLDER.format(action=action)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            process.stdout.readline()
            yield process, ProcessSample.read(process.pid)
        finally:
            process.kill()


def act(process: subprocess.Popen[str]) -> ProcessSample:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    return ProcessSample.read(process.pid)


def test_heap_is_anonymous() -> None:
    with holder(f"held = bytearray(b'x' * {64 * MIB})") as (process, before):
        after = act(process)
    assert after.anonymous_bytes - before.anonymous_bytes == pytest.approx(64 * MIB, abs=TOLERANCE_BYTES)
    assert after.rss_bytes - before.rss_bytes == pytest.approx(64 * MIB, abs=TOLERANCE_BYTES)
    assert after.shmem_bytes == before.shmem_bytes


def test_a_shared_pool_that_is_touched_is_not_anonymous() -> None:
    with holder(f"held = mmap.mmap(-1, {64 * MIB}); held.write(b'x' * {64 * MIB})") as (process, before):
        after = act(process)
    assert after.shmem_bytes - before.shmem_bytes == pytest.approx(64 * MIB, abs=TOLERANCE_BYTES)
    assert after.anonymous_bytes - before.anonymous_bytes < TOLERANCE_BYTES


def test_files_and_threads_are_counted() -> None:
    action = "import threading; held = [open('/dev/null') for _ in range(9)]; threading.Thread(target=threading.Event().wait).start()"
    with holder(action) as (process, before):
        after = act(process)
    assert after.num_open_files - before.num_open_files == 9
    assert after.num_threads - before.num_threads == 1


def test_the_sampler_follows_a_tree_and_says_who_ended() -> None:
    root = process_id(os.getpid())
    assert root is not None
    sampler = Sampler(root)
    with holder("pass") as (process, _):
        sampler.sample(0.0)
        sampler.sample(1.0)
        found = {history.pid: history for history in sampler.histories}
        assert {os.getpid(), process.pid} <= found.keys()
        assert list(found[process.pid].columns["time_s"]) == [0.0, 1.0]
        assert not found[process.pid].ended
    sampler.sample(2.0)
    assert found[process.pid].ended
    assert len(found[process.pid]) == 2
    assert not found[os.getpid()].ended
    assert list(found[os.getpid()].columns["time_s"]) == [0.0, 1.0, 2.0]


def test_a_process_beside_the_tree_only_looks_on() -> None:
    own = process_id(os.getpid())
    assert own is not None
    with holder("pass") as (process, _):
        root = process_id(process.pid)
        assert root is not None
        sampler = Sampler(root, (own,))
        sampler.sample(0.0)
        assert {history.pid: history.is_cluster for history in sampler.histories} == {process.pid: True, os.getpid(): False}


def test_a_process_that_has_ended_cannot_be_read() -> None:
    with holder("pass") as (process, _):
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie still has an entry
        with pytest.raises(ProcessLookupError):
            ProcessSample.read(process.pid)


def test_a_long_history_stays_small_and_even() -> None:
    history = History("x", 1, is_replica=False)
    sample = ProcessSample.read(os.getpid())
    for index in range(5 * MAX_SAMPLES):
        history.add(float(index), sample)
        assert len(history) < MAX_SAMPLES
    times_s = list(history.columns["time_s"])
    assert {later - earlier for earlier, later in itertools.pairwise(times_s)} == {8.0}
    assert times_s[0] == 0.0
    assert times_s[-1] > 5 * MAX_SAMPLES - 9


def test_a_history_takes_its_memory_at_once() -> None:
    history = History("x", 1, is_replica=False)
    sample = ProcessSample.read(os.getpid())
    history.add(0.0, sample)
    tracemalloc.start()
    try:
        for index in range(1, MAX_SAMPLES - 1):
            history.add(float(index), sample)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history) == MAX_SAMPLES - 1
    assert held < 4096  # the loop's own; the samples are 200 KiB
