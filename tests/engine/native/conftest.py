"""The compiled kernels, on each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from cluster.engine.native.build import load_kernels

ISAS = ("portable", "avx2", "avx512", "amx")


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """Builds them the first time."""
    module = load_kernels()
    if module is None:
        pytest.skip("this machine cannot build the native kernels")
    return module


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    """Each instruction set in turn."""
    if request.param not in native.supported_isas():
        pytest.skip(f"this machine has no {request.param}")
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[int]:
    """One thread and two."""
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(1)
