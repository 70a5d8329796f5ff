"""What a figure was measured on: a figure without it cannot be compared with another."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_INSTRUCTION_SETS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine and the versions that compute on it."""

    cpu: str
    cores: int  # those this process may use
    memory_gib: float
    instruction_sets: tuple[str, ...]  # of those that matter to matrix kernels
    python: str
    torch: str
    ray: str
    commit: str  # of Baton; `+` when the working tree differs from it

    def __str__(self) -> str:
        return f"{self.cores} cores of {self.cpu} ({', '.join(self.instruction_sets)}), {self.memory_gib} GiB, torch {self.torch}"


def describe_hardware() -> Hardware:
    """Reads it from the kernel; works without root."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    flags = _field(cpuinfo, "flags").split()
    return Hardware(
        cpu=_cpu_name(cpuinfo),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        instruction_sets=tuple(name for name in _INSTRUCTION_SETS if name in flags),
        python=platform.python_version(),
        torch=version("torch"),
        ray=_version("ray"),
        commit=_commit(),
    )


def _version(package: str) -> str:
    """Of a package that not every benchmark needs."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name(cpuinfo: str) -> str:
    """Virtual machines often hide the model's name; family and model numbers still tell the generation."""
    name = _field(cpuinfo, "model name") or platform.machine()
    family, model = _field(cpuinfo, "cpu family"), _field(cpuinfo, "model")
    return f"{name} (family {family} model {model})" if family else name


def _field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _commit() -> str:
    root = Path(__file__).parent.parent
    found = subprocess.run(
        ["git", "--no-optional-locks", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
