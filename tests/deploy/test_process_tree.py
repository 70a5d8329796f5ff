"""Processes of our own are found and awaited; others with their ids are not."""

from __future__ import annotations

import os
import subprocess
import sys

from deploy.process_tree import ProcessId, await_end, descendants

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


def test_grandchildren_are_found_and_their_end_is_seen() -> None:
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        found = descendants() - before
        assert {process.pid for process in found} == {parent.pid, grandchild}
        assert await_end(found, timeout_s=0.1) == found
        for process in found:
            process.kill()
    assert await_end(found, timeout_s=10) == set()


def test_a_reused_id_is_another_process() -> None:
    ours = next(iter(p for p in descendants(os.getppid()) if p.pid == os.getpid()))
    assert ours.is_alive()
    assert not ProcessId(ours.pid, ours.start_tick + 1).is_alive()
    ProcessId(ours.pid, ours.start_tick + 1).kill()  # reaches nobody, or this test would end here


ORPHAN = """
import subprocess, sys
from deploy.process_tree import adopt_orphans, descendants, end_descendants
adopt_orphans()
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
subprocess.run([sys.executable, "-c", middle])
assert len(descendants()) == 1, "its parent is gone, it is not"
end_descendants(0)
assert not descendants()
"""


def test_orphans_are_ended_too() -> None:
    subprocess.run([sys.executable, "-c", ORPHAN], check=True, timeout=30)
