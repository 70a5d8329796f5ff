"""All tests that need a device, in a process of their own: one that hangs on the device ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parent.parent.parent
_COUNTS: Final = ("tests", "failures", "errors", "skipped")


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """How the tests went."""

    passed: int
    failed: int  # errors of fixtures too
    skipped: int
    duration_s: float
    timed_out: bool

    @property
    def is_good(self) -> bool:
        """Whether tests ran and all of them passed. A skipped one is one that did not run: on a device none may be."""
        return self.passed > 0 and not self.failed and not self.skipped and not self.timed_out


def pytest_command(report: Path, tests: Sequence[str] = ()) -> list[str]:
    """Runs the `gpu` tests among `tests` (default: all) and writes what became of them to `report`."""
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]


def run_suite(limit_s: float, tests: Sequence[str] = ()) -> SuiteResult:
    """Runs the tests, their output on stderr; ends them, with all that they have started, after `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        started_s = time.monotonic()
        process = subprocess.Popen(pytest_command(report, tests), cwd=ROOT, stdout=sys.stderr, start_new_session=True)
        try:
            process.wait(limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        return _result(report, time.monotonic() - started_s, timed_out)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(report: Path, duration_s: float, timed_out: bool) -> SuiteResult:
    """Without a report, as after a timeout, nothing has passed."""
    if not report.exists():
        return SuiteResult(0, 0 if timed_out else 1, 0, round(duration_s, 1), timed_out)
    counts = dict.fromkeys(_COUNTS, 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in _COUNTS:
            counts[name] += int(suite.get(name, "0"))
    failed = counts["failures"] + counts["errors"]
    return SuiteResult(counts["tests"] - failed - counts["skipped"], failed, counts["skipped"], round(duration_s, 1), timed_out)
