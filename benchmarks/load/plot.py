"""Latency over time as a picture: one dot a request, at the moment it was sent; below it, the output rate."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.load.driver import LoadResult
from benchmarks.load.trace import Trace, deal_tokens
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_BINS: Final = 60


def require_matplotlib() -> None:
    """Called before a run, which would be lost otherwise.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: `make .venv/.bench`, or pip install -r requirements/bench.txt", param="--plot")


def draw(result: LoadResult, title: str, path: Path) -> None:
    """Writes a PNG."""
    from matplotlib.figure import Figure  # the object API: no display, no global state

    figure = Figure(figsize=(10, 7), layout="constrained")
    latencies, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _draw_latencies(latencies, result)
    latencies.set_title(title)
    _draw_rate(rate, result)
    rate.set_xlabel("seconds after the start")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)


def _draw_latencies(axes: Axes, result: LoadResult) -> None:
    answered = result.answered
    sent_s = [trace.sent_s for trace in answered]
    axes.scatter(sent_s, [trace.e2e_s for trace in answered], s=8, label="end-to-end (s)")
    axes.scatter(sent_s, [trace.ttft_s for trace in answered], s=8, label="TTFT (s)")
    timed = [trace for trace in answered if trace.tpot_s]
    axes.scatter([trace.sent_s for trace in timed], [trace.tpot_s or 0.0 for trace in timed], s=8, label="TPOT (s)")
    failed = [trace for trace in result.traces if not trace.answered]
    if failed:
        axes.scatter([trace.sent_s for trace in failed], [trace.e2e_s for trace in failed], s=24, c="red", marker="x", label="failed (s)")
    if result.traces:
        axes.set_yscale("log")
        axes.legend()
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.3)


def _draw_rate(axes: Axes, result: LoadResult) -> None:
    width_s = result.duration_s / _NUM_BINS
    rates = [num_tokens / width_s for num_tokens in tokens_by_bin(result.traces, result.duration_s, _NUM_BINS)]
    axes.step([index * width_s for index in range(_NUM_BINS)], rates, where="post")
    axes.set_ylabel("output tokens/s")
    axes.grid(alpha=0.3)


def tokens_by_bin(traces: Sequence[Trace], duration_s: float, num_bins: int) -> list[int]:
    """How many output tokens arrived in each of `num_bins` equal parts of the run."""
    bins = [0] * num_bins
    for trace in traces:
        for chunk, num_tokens in zip(trace.chunks, deal_tokens(trace.chunks, trace.num_output_tokens), strict=True):
            bins[min(num_bins - 1, int(chunk.arrived_s / duration_s * num_bins))] += num_tokens
    return bins
