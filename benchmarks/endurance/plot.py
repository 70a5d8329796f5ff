"""Memory over time as a picture: one line a process, anonymous memory below RSS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.endurance.sampler import History

_MIB: Final = 2**20
_PANELS: Final = {"rss_bytes": "RSS (MiB)", "anonymous_bytes": "anonymous (MiB)", "num_open_files": "open files"}


def draw(histories: Sequence[History], warm_up_s: float, title: str, path: Path) -> None:
    """Writes a PNG."""
    from matplotlib.figure import Figure  # the object API: no display, no global state

    figure = Figure(figsize=(11, 12), layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (column, label) in zip(panels, _PANELS.items(), strict=True):
        unit = _MIB if column.endswith("_bytes") else 1
        for history in histories:
            axes.plot(history.columns["time_s"], [value / unit for value in history.columns[column]], label=history.name, linewidth=1)
        axes.axvline(warm_up_s, color="grey", linestyle=":")
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_title(title)
    panels[0].legend(fontsize="x-small", ncols=3)
    panels[-1].set_xlabel("seconds after the start")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
