"""Where there is no memory for scratch: an error for the caller, on whatever thread it was missed, and kernels that go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: its address space is limited, and a mistake ends it. Scratch is 288 bytes an input, on each thread.
SCRIPT = """
import resource
import sys
from pathlib import Path

import torch

from cluster.engine.native.build import native_module
from cluster.engine.native.linear import Bf16Linear
from tests.engine.native.activations import apply

MANY = 2**20
torch.set_num_threads(1)
native = native_module()
native.set_num_threads(int(sys.argv[1]))
num_bytes = 8 * native.panel_bytes(native.WeightFormat.BF16, MANY)
panels = torch.zeros(num_bytes + 64, dtype=torch.uint8)
huge = Bf16Linear(panels[-panels.data_ptr() % 64 :][:num_bytes], 256, MANY, None)
small = Bf16Linear.from_float(torch.randn(300, 64))
x, long_x = torch.randn(3, 64), torch.zeros(1, MANY)
many_x = torch.randn(512, 64)
for _ in range(100):  # every thread gets its thread-local data while there is memory: without, glibc ends the process
    apply(small, many_x)
before_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
for _ in range(3):
    resource.setrlimit(resource.RLIMIT_AS, (before_bytes + 100 * MANY, resource.RLIM_INFINITY))
    try:
        apply(huge, long_x)
        raise SystemExit("the limit did not hold")
    except MemoryError:
        pass
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    y = apply(small, x)
native.set_num_threads(1)
assert torch.equal(apply(small, x), y)
"""


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_missing_scratch_is_an_error_and_not_the_end(num_threads: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(num_threads)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
