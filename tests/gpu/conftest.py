"""These tests need a CUDA device and say so where there is none. `python -m benchmarks.gpu_check` runs them all."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import PlaneUnavailable
from cluster.kv_transfer.nccl_library import CupyDevice, load, open_device
from tests.kv_transfer.planes import HOST


@pytest.fixture(autouse=True)
def _needs_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        load()
    except PlaneUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def memory() -> torch.device:
    """The first device's memory, to torch."""
    return torch.device("cuda", 0)


@pytest.fixture
def device(memory: torch.device) -> CupyDevice:
    return open_device(torch.empty(1, 1, dtype=torch.uint8, device=memory), HOST)
