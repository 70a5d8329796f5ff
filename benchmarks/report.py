"""How benchmarks speak: progress on stderr while they run, then a table, then one line of JSON that is kept in `benchmarks/results/`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.hardware import describe_hardware

RESULTS: Final = Path(__file__).parent / "results"


def progress(line: str) -> None:
    """Says on stderr what is going on, so that stdout holds results alone."""
    print(f"==> {line}", file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: it reads well in a terminal and can be pasted into the README."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def command_line() -> str:
    """What the user typed, in a form that runs from the repository's root."""
    program = Path(sys.argv[0]).stem
    start = "python -m deploy.cli" if program in ("baton", "cli") else f"python -m benchmarks.{program}"
    return shlex.join([*start.split(), *sys.argv[1:]])


def publish(name: str, result: dict[str, Any], file: Path | None) -> None:
    """Prints `result` with hardware, command and date as one line of JSON, and appends it to `file`, where one is given."""
    record = {
        "benchmark": name,
        "command": command_line(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": asdict(describe_hardware()),
        **result,
    }
    line = json.dumps(record)
    print(line, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as results:
            results.write(line + "\n")
