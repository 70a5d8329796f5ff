"""What of the GPU check needs no GPU: that it refuses to run without one, how it runs the tests, and that its measuring measures."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import device as gpu_device
from benchmarks.gpu.device import DeviceDescription, NoDevice, find_device
from benchmarks.gpu.self_send import measure
from benchmarks.gpu.suite import SuiteResult, pytest_command, run_suite
from cluster.errors import PlaneUnavailable
from tests.kv_transfer.socket_device import SocketDevice

CPU = torch.device("cpu")


class TestWithoutDevice:
    def test_it_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        results = tmp_path / "results.jsonl"
        assert gpu_check.main(["--results", str(results)]) == 2
        output = capsys.readouterr()
        assert output.err == "gpu_check needs a CUDA device: torch sees no CUDA device\n"
        assert output.out == "" and not results.exists(), "nothing was measured"

    def test_torch_may_have_no_cuda_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(NoDevice, match="is a build without CUDA"):
            find_device()

    def test_cupy_is_as_necessary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise PlaneUnavailable("cupy does not find NCCL")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(gpu_device, "load", fail)
        with pytest.raises(NoDevice, match="cupy does not find NCCL"):
            find_device()

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--no-tests", "--no-figures"], "leave nothing to do"),
            (["--repeats", "0"], "must be positive"),
            (["--tests-limit", "-1"], "must be positive"),
        ],
    )
    def test_options_that_make_no_sense(self, options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            gpu_check.main(options)
        assert caught.value.code == 2
        assert says in capsys.readouterr().err

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            gpu_check.main(["--help"])
        assert caught.value.code == 0
        assert "--tests-limit SECONDS" in capsys.readouterr().out


SCRIPT = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_passes(): ...
def test_fails(): assert False
@pytest.fixture
def broken(): raise OSError
def test_error(broken): ...
def test_skips(): pytest.skip("why")
"""


class TestSuite:
    def test_command(self) -> None:
        command = pytest_command(Path("report.xml"), ["tests/gpu"])
        assert command[:5] == [sys.executable, "-m", "pytest", "-m", "gpu"]
        assert command[-2:] == ["--junitxml=report.xml", "tests/gpu"]

    def test_counts_what_became_of_each_test(self, tmp_path: Path) -> None:
        script = tmp_path / "test_script.py"
        script.write_text(SCRIPT)
        result = run_suite(120, [str(script)])
        assert (result.passed, result.failed, result.skipped, result.timed_out) == (1, 2, 1, False)
        assert not result.is_good

    def test_ends_what_hangs(self, tmp_path: Path) -> None:
        script = tmp_path / "test_script.py"
        script.write_text("import subprocess, pytest\n@pytest.mark.gpu\ndef test_hangs(): subprocess.run(['sleep', '300'])\n")
        started_s = time.monotonic()
        result = run_suite(3, [str(script)])
        assert time.monotonic() - started_s < 30
        assert result.timed_out and result.passed == 0 and not result.is_good

    @pytest.mark.parametrize(
        ("result", "is_good"),
        [
            (SuiteResult(3, 0, 0, 1.0, False), True),
            (SuiteResult(0, 0, 0, 1.0, False), False),
            (SuiteResult(3, 0, 1, 1.0, False), False),
            (SuiteResult(3, 1, 0, 1.0, False), False),
            (SuiteResult(3, 0, 0, 1.0, True), False),
        ],
    )
    def test_is_good_when_all_ran_and_passed(self, result: SuiteResult, is_good: bool) -> None:
        assert result.is_good == is_good


class TestFigures:
    def test_are_of_all_sizes_and_of_bytes_that_arrived(self) -> None:
        figures = list(measure(SocketDevice(), CPU, 2, blocks=[1000, 4096], reads=[500, 5000]))
        assert [(figure.block_bytes, figure.num_blocks) for figure in figures] == [(1000, 1), (1000, 5), (4096, 1), (4096, 1)]
        for figure in figures:
            assert min(figure.blocks_gb_s, figure.one_send_gb_s, figure.copy_gb_s) > 0
            seconds = figure.us_per_block * figure.num_blocks / 1e6
            assert figure.blocks_gb_s == pytest.approx(figure.block_bytes * figure.num_blocks / seconds / 1e9)

    def test_bytes_that_do_not_arrive_are_no_figure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.kv_transfer.socket_device._copy", lambda _group: None)
        with pytest.raises(RuntimeError, match="bytes of blocks did not arrive"):
            list(measure(SocketDevice(), CPU, 1, blocks=[1000], reads=[1000]))

    def test_what_was_measured_before_a_failure_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The whole command around a device of sockets: the line of JSON, the table and the exit code."""
        description = DeviceDescription("sockets", 1, 0.0, 0, "0.0", "none", 0, 0, SocketDevice.version, "none", torch.__version__, "none")
        monkeypatch.setattr(gpu_check, "find_device", SocketDevice)
        monkeypatch.setattr(gpu_check, "describe_device", lambda _device: description)

        def fail_after_one(device: SocketDevice, _memory: torch.device, repeats: int, **sizes: object) -> object:
            yield from measure(device, CPU, repeats, blocks=[1000], reads=[1000])
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(gpu_check, "measure", fail_after_one)
        results = tmp_path / "results.jsonl"
        assert gpu_check.main(["--no-tests", "--repeats", "1", "--results", str(results)]) == 1
        record = json.loads(results.read_text())
        assert record["benchmark"] == "gpu_check" and record["device"]["name"] == "sockets"
        assert [figure["num_blocks"] for figure in record["figures"]] == [1]
        assert "illegal memory access" in record["problem"] and "tests" not in record
        assert "| 1 KiB" in capsys.readouterr().out
