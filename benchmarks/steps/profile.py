"""Where the time of steps goes: by operation for torch's kernels, by Python function for the native ones, which run in one call."""

from __future__ import annotations

import cProfile
import io
import pstats
from typing import Final

import torch

from benchmarks.steps.bench import EngineBench
from benchmarks.steps.case import Case, DecodeCase

_NUM_LINES: Final = 40
_NUM_DECODE_STEPS: Final = 20


def profile_case(bench: EngineBench, case: Case) -> str:
    """Runs a few samples of a case under a profiler, which slows them down; a table with a heading."""
    num_samples = _NUM_DECODE_STEPS if isinstance(case, DecodeCase) else 1
    bench.start(case)
    bench.sample()
    report = _functions(bench, num_samples) if bench.kernels_name.startswith("native") else _operations(bench, num_samples)
    bench.finish()
    return f"# {case}, {bench.domain}: {num_samples} samples\n\n{report}\n"


def num_profiled_samples() -> int:
    """The most that `profile_case` runs."""
    return _NUM_DECODE_STEPS + 1


def _operations(bench: EngineBench, num_samples: int) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(num_samples):
            bench.sample()
    table: str = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_NUM_LINES)
    return table


def _functions(bench: EngineBench, num_samples: int) -> str:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_samples):
        bench.sample()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_NUM_LINES)
    return text.getvalue()
