"""What a start says of the kernels that it builds, or cannot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from cluster.config import load_config
from cluster.engine.native.build import BuildError, Report
from deploy import kernel_build
from deploy.progress import Progress


def build(**args: Any) -> str:
    """What is said."""
    said = io.StringIO()
    kernel_build.build_kernels(load_config({"model": "demo", **args}), Progress(said))
    return said.getvalue()


def test_a_build_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(report: Report) -> Path:
        report("building native kernels")
        return Path("library.so")

    monkeypatch.setattr(kernel_build, "build_library", library)
    assert "building native kernels" in build()
    float32 = {"scheme": "float32", "kv_dtype": "float32"}
    assert build(prefill={"kernels": "torch"}, decode={"kernels": "torch"}) == ""
    assert build(prefill=float32, decode=float32) == "", "torch computes it"


@pytest.mark.parametrize("error", [BuildError("there is no C++ compiler (c++)"), PermissionError(13, "Permission denied")])
def test_without_a_library_the_start_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def library(_report: Report) -> Path:
        raise error

    monkeypatch.setattr(kernel_build, "build_library", library)
    assert f"no native kernels: {error}; torch's serve instead, slower" in build()
