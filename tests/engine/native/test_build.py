"""The builder, on a module of a few lines in a cache of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.engine.native import build

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "baton_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_baton_native() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", 42);
  return module;
}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sources, which a test may write to."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "module.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    before = dict(build.LOADED)
    build.LOADED.clear()
    yield folder
    build.LOADED.clear()
    build.LOADED.update(before)


def test_it_is_built_once_and_again_for_other_sources(sources: Path) -> None:
    lines: list[str] = []
    module = build.load_kernels(lines.append)
    assert module is not None and module.answer == 42
    assert len(lines) == 1 and "once" in lines[0]
    first = build.library_path()
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    build.LOADED.clear()
    assert build.load_kernels(lines.append) is not None
    assert len(lines) == 1
    (sources / "module.h").write_text("// another header is another library\n")
    assert build.library_path() != first


def test_processes_that_start_together_build_once(sources: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from cluster.engine.native import build; "
        f"build.SOURCES = Path({str(sources)!r}); print(build.load_kernels(print).answer)"
    )
    children = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate(timeout=300)[0] for child in children]
    assert [output.splitlines()[-1] for output in outputs] == ["42", "42"]
    assert sum("building" in output for output in outputs) == 1


@pytest.mark.parametrize("fault", ["no compiler", "no ninja", "broken source", "another platform", "no room"])
def test_without_a_library_one_warning_says_why(
    sources: Path, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    match fault:
        case "no compiler":
            monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
        case "no ninja":
            monkeypatch.setattr("shutil.which", lambda command, **_: None)
        case "broken source":
            (sources / "module.cpp").write_text("int broken(\n")
        case "another platform":
            monkeypatch.setattr("platform.machine", lambda: "riscv64")
        case "no room":
            (tmp_path / "file").touch()
            monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file"))
    said = {
        "no compiler": "no-such-compiler",
        "no ninja": "ninja",
        "broken source": "error",
        "another platform": "riscv64",
        "no room": "file",
    }
    with caplog.at_level(logging.WARNING, logger=build.__name__):
        assert build.load_kernels() is None
        assert build.load_kernels(print) is None
    assert len(caplog.records) == 1
    assert said[fault] in caplog.text and "torch instead" in caplog.text
    with pytest.raises(RuntimeError, match="not available"):
        build.native_module()


def test_building_ahead_says_where_or_why_not(sources: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.main() == 0
    assert str(build.library_path()) in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 1
    assert "no-such-compiler" in capsys.readouterr().err
