"""The machine's own limits, measured by code that does nothing else: what fraction of them a step reaches is the benchmark's result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

from cluster.engine.huge_pages import huge_page_zeros
from cluster.engine.native.build import load_kernels
from cluster.errors import ConfigError
from cluster.host_memory import available_bytes

# More than the caches of large servers hold; a smaller part of a large shared cache is a limit of nobody's.
_STREAM_BYTES: Final = 1 << 30
_NUM_READS: Final = 5
_NUM_RUNS: Final = 3
_RUN_S: Final = 0.05
# The first for which the machine has instructions: without any for 4 bits those for 8 do, without bfloat16 float32's.
_TYPES_OF_SCHEME: Final = {"int8": ("int8",), "int4": ("int4", "int8"), "bf16": ("bf16", "float32"), "float32": ("float32",)}


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Best of a few runs each, on the threads that the engine has."""

    read_gb_per_s: float  # one stream a thread over huge pages
    peak_gop_per_s: dict[str, float]  # of arithmetic on registers, by type and instruction: int8_dot, bf16_tile, …

    def best(self, other: MachineLimits) -> MachineLimits:
        """The higher of each: what else the machine does only ever lowers them."""
        peaks = {name: max(peak, other.peak_gop_per_s[name]) for name, peak in self.peak_gop_per_s.items()}
        return MachineLimits(max(self.read_gb_per_s, other.read_gb_per_s), peaks)

    def peak_for(self, scheme: str) -> float | None:
        """Of the fastest instruction for the type that a scheme multiplies in; None where only scalars do."""
        for kind in _TYPES_OF_SCHEME[scheme]:
            found = [peak for name, peak in self.peak_gop_per_s.items() if name.startswith(f"{kind}_")]
            if found:
                return max(found)
        return None

    def __str__(self) -> str:
        peaks = ", ".join(f"{name} {peak:.0f}" for name, peak in self.peak_gop_per_s.items())
        return f"reads {self.read_gb_per_s:.1f} GB/s; peaks in GOP/s: {peaks or 'none'}"


def measure_limits(num_threads: int) -> MachineLimits | None:
    """Takes some seconds; None on a machine without native kernels, which the probe is part of.

    Raises:
        ConfigError: there is no memory for the probe.
    """
    native = load_kernels()
    if native is None:
        return None
    if available_bytes() < _STREAM_BYTES:
        raise ConfigError(f"the probe of the memory's bandwidth needs {_STREAM_BYTES} bytes, {available_bytes()} are available")
    native.set_num_threads(num_threads)
    peaks = {peak.name: _peak_gop_per_s(peak, num_threads) for peak in native.peaks()}
    return MachineLimits(_read_gb_per_s(native), peaks)


def _read_gb_per_s(native: ModuleType) -> float:
    stream = huge_page_zeros(_STREAM_BYTES).zero_()
    return _STREAM_BYTES / min(_time_s(lambda: native.read_stream(stream.data_ptr(), _STREAM_BYTES)) for _ in range(_NUM_READS)) / 1e9


def _peak_gop_per_s(peak: Any, num_threads: int) -> float:
    num_rounds = 1000
    while (duration_s := _time_s(partial(peak.run, num_rounds))) < _RUN_S:
        num_rounds *= 4
    fastest_s = min(duration_s, *(_time_s(partial(peak.run, num_rounds)) for _ in range(_NUM_RUNS)))
    return float(num_threads * num_rounds * peak.num_operations / fastest_s / 1e9)


def _time_s(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
