"""The limits are those that the kernels were compiled with."""

from __future__ import annotations

from types import ModuleType

from cluster.engine.native import limits


def test_python_and_the_compiler_agree(native: ModuleType) -> None:
    for name in ("GROUP_SIZE", "PANEL_CHANNELS", "HEAD_DIM_STEP", "MAX_HEAD_DIM", "MAX_HEADS_PER_KV_HEAD"):
        assert getattr(limits, name) == getattr(native, name), name
    powers = tuple(2**exponent for exponent in range(32))
    assert tuple(size for size in powers if native.MIN_BLOCK_SIZE <= size <= native.MAX_BLOCK_SIZE) == limits.BLOCK_SIZES
