"""The state of a cluster as lines of text, made of what `GET /v1/cluster` answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_HEADER: Final = ("worker", "life", "state", "age", "run", "wait", "KV used", "tokens/s", "steps/s")
_IS_NUMBER: Final = (False, False, False, True, True, True, True, True, True)
_KV_COLUMN: Final = 6
_LIFE_CHARS: Final = 6
_MIN_BAR_CHARS, _MAX_BAR_CHARS = 4, 16
_GAP: Final = "  "


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, and when it came (`time.monotonic()`)."""

    taken_s: float
    cluster: Mapping[str, Any]


def cluster_lines(sample: Sample, previous: Sample | None, width: int) -> list[str]:
    """The table.

    Args:
        previous: an earlier sample; rates are over the time between the workers' reports in the two, and unknown without it.
        width: of the terminal, in characters; no line is longer.
    """
    cluster = sample.cluster
    rows = {name: _rows(pool, sample, previous) for name, pool in cluster["pools"].items()}
    lines = [*_router_lines(cluster), *_queue_lines(cluster["queue"]), _placements(cluster["live_placements"]), ""]
    widths = _column_widths([row.cells for pool in rows.values() for row in pool])
    bar_chars = min(_MAX_BAR_CHARS, width - sum(widths) - len(_GAP) * len(widths) - len("  "))
    for name, pool in rows.items():
        lines += _pool_lines(name, cluster["pools"][name]["kv_blocks"], pool, widths, bar_chars)
    return [fitted(line, width) for line in lines]


def fitted(line: str, width: int) -> str:
    """`line` in at most `width` characters."""
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[str, ...]
    used_share: float


def _router_lines(cluster: Mapping[str, Any]) -> Iterator[str]:
    model = cluster["model"]
    yield f"model   {model['name']}, context {model['max_model_len']:,}, {model['system_fingerprint']}"
    ready = "ready" if cluster["ready"] else f"NOT READY: {cluster['reason']}"
    yield f"router  epoch {cluster['epoch']}, {cluster['state']}, {ready}"


def _queue_lines(queue: Mapping[str, Any]) -> Iterator[str]:
    yield f"queue   requests {queue['num_requests']:,}, tokens {queue['num_tokens']:,}"
    for name, of_class in queue["by_class"].items():
        if of_class["num_requests"]:
            counts = f"requests {of_class['num_requests']:,}, tokens {of_class['num_tokens']:,}"
            yield f"        {name}: {counts}, oldest waits {duration(of_class['oldest_wait_s'])}"


def _placements(live: Mapping[str, int]) -> str:
    return "live    " + ", ".join(f"{phase} {count:,}" for phase, count in live.items())


def _pool_lines(name: str, blocks: Mapping[str, int], rows: Sequence[_Row], widths: Sequence[int], bar_chars: int) -> Iterator[str]:
    yield f"{name}: " + ", ".join(f"{blocks[state]:,} {state}" for state in ("owned", "leased", "cached", "free")) + " KV blocks"
    if not rows:
        yield "  no worker"
        return
    with_bar = bar_chars >= _MIN_BAR_CHARS
    yield _line(_HEADER, widths, " " * bar_chars if with_bar else "")
    for row in rows:
        yield _line(row.cells, widths, bar(row.used_share, bar_chars) if with_bar else "")


def _rows(pool: Mapping[str, Any], sample: Sample, previous: Sample | None) -> list[_Row]:
    before = {worker["incarnation"]: worker for worker in _workers(previous)} if previous else {}
    return [_row(worker, sample, before.get(worker["incarnation"]), previous) for worker in pool["workers"]]


def _workers(sample: Sample) -> Iterator[Mapping[str, Any]]:
    for pool in sample.cluster["pools"].values():
        yield from pool["workers"]


def _row(worker: Mapping[str, Any], sample: Sample, before: Mapping[str, Any] | None, previous: Sample | None) -> _Row:
    blocks = worker["kv_blocks"]
    used = blocks["owned"] + blocks["leased"]
    elapsed_s = 0.0
    if before is not None and previous is not None:
        elapsed_s = (sample.taken_s - worker["age_s"]) - (previous.taken_s - before["age_s"])
    cells = (
        worker["worker_id"],
        worker["incarnation"][:_LIFE_CHARS],
        worker["state"],
        duration(worker["age_s"]),
        f"{worker['num_seqs_running']:,}",
        f"{worker['num_seqs_waiting']:,}",
        f"{used:,}/{blocks['total']:,}",
        _rate(worker, before, "num_tokens_total", elapsed_s),
        _rate(worker, before, "num_steps", elapsed_s),
    )
    return _Row(cells, used / blocks["total"] if blocks["total"] else 0.0)


def _rate(worker: Mapping[str, Any], before: Mapping[str, Any] | None, counter: str, elapsed_s: float) -> str:
    if before is None or elapsed_s < 0.01:  # the same report
        return "-"
    return f"{(worker[counter] - before[counter]) / elapsed_s:,.1f}"


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[column]) for row in (_HEADER, *rows)) for column in range(len(_HEADER))]


def _line(cells: Sequence[str], widths: Sequence[int], bar_text: str) -> str:
    padded = [
        cell.rjust(width) if is_number else cell.ljust(width) for cell, width, is_number in zip(cells, widths, _IS_NUMBER, strict=True)
    ]
    if bar_text:
        padded.insert(_KV_COLUMN + 1, bar_text)
    return ("  " + _GAP.join(padded)).rstrip()


def bar(share: float, num_chars: int) -> str:
    """`share` of 1 as a bar; anything above 0 shows."""
    filled = min(num_chars, max(round(share * num_chars), 1 if share > 0 else 0))
    return "█" * filled + "░" * (num_chars - filled)


def duration(seconds: float) -> str:
    """Seconds, to the eye."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
