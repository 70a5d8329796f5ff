"""The compiled kernels, where this machine can have them."""

from __future__ import annotations

from types import ModuleType

import pytest

from cluster.engine.native.build import load_kernels


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """Builds them the first time."""
    module = load_kernels()
    if module is None:
        pytest.skip("this machine cannot build the native kernels")
    return module
