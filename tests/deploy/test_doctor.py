"""`baton doctor` against a server that tells prepared books, one after another: output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from deploy import doctor
from deploy.cli import main
from tests.conftest import free_port
from tests.deploy.books_of import cluster, process
from tests.deploy.books_server import answering, telling

LEAK = cluster(process("decode", held={"blocks_owned": 2}))
BUSY = cluster(process("gateway", requests=("r",)), process("router", requests=("r",)), process("decode", requests=("r",)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CONFIRM_S", 0.01)


Said = Callable[[], tuple[str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def read() -> tuple[str, str]:
        captured = capsys.readouterr()
        return captured.out, captured.err

    return read


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_an_idle_cluster(said: Said, suffix: str) -> None:
    with answering(*telling(cluster())) as url:
        assert main(["doctor", url + suffix]) == 0
    lines = said()[0].splitlines()
    assert lines[0].split() == ["process", "kind", "open", "files", "KV", "pools", "mapped", "RSS", "threads", "holds"]
    assert lines[1].split() == ["host-gateway", "gateway", "25", "none", "300", "MiB", "30", "nothing"]
    assert lines[3].split() == ["host-prefill", "prefill", "28", "1:", "512", "MiB", "300", "MiB", "30", "nothing"]
    assert lines[5:] == ["", "balanced: idle"]


def test_running_requests_are_balanced(said: Said) -> None:
    with answering(*telling(BUSY)) as url:
        assert main(["doctor", url]) == 0
    assert said()[0].endswith("\nbalanced: 1 request running\n")


def test_a_worker_in_a_long_step_is_shown(said: Said) -> None:
    with answering(*telling(cluster(process("decode", held={"blocks_owned": 2}, is_busy=True)), cluster())) as url:
        assert main(["doctor", url]) == 0
        assert "blocks_owned 2 before a long step" in said()[0]
        assert main(["doctor", url, "--wait", "60"]) == 0


def test_a_leak_is_off_once_it_was_seen_twice(said: Said) -> None:
    with answering(*telling(LEAK)) as url:
        assert main(["doctor", url]) == 1
    out, _ = said()
    assert out.endswith("\noff:\n  decode host-decode holds blocks_owned 2 and no request is running\n")
    with answering(*telling(LEAK, cluster())) as url:
        assert main(["doctor", url]) == 0
    assert said()[0].endswith("\nbalanced: idle\n")


def test_wait_ends_when_all_is_idle(said: Said) -> None:
    with answering((503, "starting"), *telling(LEAK, BUSY, BUSY, LEAK, cluster())) as url:
        assert main(["doctor", url, "--wait", "60"]) == 0
    assert said()[0].endswith("\nbalanced: idle\n")


def test_wait_that_is_over_before_all_is_idle_is_no_success(said: Said) -> None:
    with answering(*telling(BUSY)) as url:
        assert main(["doctor", url, "--wait", "0.05"]) == 1
    assert said()[0].endswith("\nbalanced: 1 request running\n")


def test_json_has_the_books_and_the_findings(said: Said) -> None:
    with answering(*telling(LEAK)) as url:
        assert main(["doctor", url, "--json"]) == 1
    report = json.loads(said()[0])
    assert (report["verdict"], report["num_running"], report["missing"]) == ("off", 0, {})
    assert [finding["trouble"] for finding in report["findings"]] == ["held"]
    assert {each["kind"]: each["held"]["blocks_owned"] for each in report["processes"]}["decode"] == 2


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((404, "not found"), "answers HTTP 404: not found"),
        ((200, "<html>"), "something else than books"),
        ((200, "{}"), "something else than books"),
    ],
)
def test_a_server_that_is_not_baton_is_unreachable(said: Said, answer: tuple[int, str], text: str) -> None:
    with answering(answer) as url:
        assert main(["doctor", url]) == 3
    out, err = said()
    assert out == ""
    assert err.startswith("baton: http://127.0.0.1:")
    assert text in err


def test_no_server_is_unreachable(said: Said) -> None:
    port = free_port()
    assert main(["doctor", f"http://127.0.0.1:{port}"]) == 3
    out, err = said()
    assert (out, err) == ("", f"baton: http://127.0.0.1:{port} does not answer: [Errno 111] Connection refused\n")


@pytest.mark.parametrize("arguments", [["localhost:8000"], ["ftp://x"], ["--wait", "-1"], ["--wait", "soon"], ["--wait", "inf"]])
def test_a_wrong_command_line_is_a_usage_error(said: Said, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert arguments[-1] in said()[1]
