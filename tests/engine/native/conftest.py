"""The compiled kernels, and every instruction set that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.engine.native.native_module import load_native

ISAS = ("portable", "avx2", "avx512", "amx")


@pytest.fixture(scope="session")
def native() -> ModuleType:
    return load_native()


@pytest.fixture(params=ISAS)
def each_isa(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    """Runs a test once for each instruction set."""
    if request.param not in native.supported_isas():
        pytest.skip(f"this machine has no {request.param}")
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
