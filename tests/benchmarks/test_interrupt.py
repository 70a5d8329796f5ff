"""Ctrl-C on `baton bench`, as a signal to a real process: what there is gets said, and nothing waits."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.driver import LoadResult
from benchmarks.load.slo import Slo
from benchmarks.load.trace import INTERRUPTED, Trace
from tests.benchmarks.fake_inference import FakeInference, serving
from tests.benchmarks.fake_inference import Script as GrpcScript
from tests.benchmarks.fake_openai import FakeOpenAI, Script, served

QUICK, STUCK = Script(), Script([(0.0, "ab"), (600.0, "late")])
ONE_ANSWERED = ", 1 answered"  # in a line of progress
LOAD = ("--input-tokens", "5", "--output-tokens", "4", "--warm-up", "0")
STUCK_CLOSING = """
import asyncio, sys
import benchmarks.serve
from tests.benchmarks.fake_transport import FakeTransport

class StuckClosing(FakeTransport):
    async def __aexit__(self, *error):
        print("closing", flush=True)
        await asyncio.sleep(600)

benchmarks.serve.transport_of = lambda options: StuckClosing(600)
sys.exit(benchmarks.serve.main(["--warm-up", "0"]))
"""


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


async def interrupted(process: asyncio.subprocess.Process, is_time: Callable[[], bool], said: str = "") -> tuple[dict[str, Any], str, str]:
    """The JSON line, the table and stderr of a process that got SIGINT when it `is_time`, and it has then `said` so on stderr: the server
    has written an answer before the process has read it."""
    assert process.stderr
    lines: list[str] = []
    try:
        async with asyncio.timeout(60):
            while not is_time():  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.01)
            while said not in "".join(lines[-1:]):
                lines.append((await process.stderr.readline()).decode())
                assert lines[-1], "".join(lines)
            process.send_signal(signal.SIGINT)
            out, err = (stream.decode() for stream in await process.communicate())
    finally:
        if process.returncode is None:
            process.kill()
    err = "".join([*lines, err])
    assert process.returncode == 130, err
    assert "Traceback" not in err
    *table, line = out.splitlines()
    return json.loads(line), "\n".join(table), err


async def test_what_was_answered_is_said(tmp_path: Path) -> None:
    fake = FakeOpenAI(*[QUICK] * 5, STUCK)
    async with served(fake) as url:
        process = await start("-m", "benchmarks.serve", url, *LOAD, "--concurrency", "3", "--results", str(tmp_path / "results.jsonl"))
        record, table, err = await interrupted(process, lambda: len(fake.seen) == 8 and all(seen.written_s for seen in fake.seen))
    assert record["interrupted"]
    assert (record["num_requests"], record["num_answered"], record["num_output_tokens"]) == (8, 5, 20)
    assert record["errors"] == {"interrupted": 3}
    assert "| TTFT" in table
    assert "5 of 8 requests answered" in table
    assert "3 failed with interrupted" in table
    assert "interrupted" in err
    assert json.loads((tmp_path / "results.jsonl").read_text()) == record
    assert len(fake.seen) == 8, "nothing was sent after the signal"


async def test_an_open_loop_over_grpc_stops_sending_and_cancels() -> None:
    fake = FakeInference(GrpcScript(), GrpcScript([(0.0, "ab", 1), (600.0, "late", 1)]))
    async with serving(fake) as target:
        process = await start("-m", "deploy.cli", "bench", f"grpc://{target}", *LOAD, "--rate", "50", "--progress-interval", "0.1")
        record, _, _ = await interrupted(process, lambda: len(fake.seen) >= 4, said=ONE_ANSWERED)
        async with asyncio.timeout(10):
            while fake.num_cancelled < len(fake.seen) - 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert record["interrupted"]
    assert record["num_answered"] == 1
    assert record["errors"]["interrupted"] == record["num_requests"] - 1 >= 3


async def test_a_search_has_the_figures_of_its_best_run() -> None:
    fake = FakeOpenAI(*[QUICK] * 6, STUCK)
    async with served(fake) as url:
        search = ("--search", "--rate", "20", "--slo", "ttft=5", "--requests", "3")
        process = await start("-m", "benchmarks.serve", url, *LOAD, *search)
        record, table, _ = await interrupted(process, lambda: len(fake.seen) >= 7)
    assert record["interrupted"]
    assert (record["num_requests"], record["num_answered"], record["errors"]) == (3, 3, {})
    assert record["loop"] == {"rate": 40.0, "burst": 1}
    assert record["search"]["highest_rate"] == 40.0
    assert not record["search"]["settled"]
    assert [probe["rate"] for probe in record["search"]["probes"]] == [20.0, 40.0]
    assert "at least 40.000 requests/s, after 2 runs" in table


async def test_a_search_in_its_first_run_has_what_there_is() -> None:
    fake = FakeOpenAI(QUICK, STUCK)
    async with served(fake) as url:
        search = ("--search", "--rate", "20", "--slo", "ttft=5", "--requests", "9")
        process = await start("-m", "benchmarks.serve", url, *LOAD, *search, "--progress-interval", "0.1")
        record, _, _ = await interrupted(process, lambda: len(fake.seen) >= 3, said=ONE_ANSWERED)
    assert record["num_answered"] == 1
    assert record["loop"] == {"rate": 20.0, "burst": 1}
    assert record["attainment"] == 1.0
    assert "search" not in record


async def test_before_the_first_request_there_is_nothing_to_say() -> None:
    fake = FakeOpenAI(STUCK)
    async with served(fake) as url:
        process = await start("-m", "benchmarks.serve", url, *LOAD[:-1], "1")
        async with asyncio.timeout(60):
            while not fake.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert process.returncode == 130
    assert not out
    assert b"Traceback" not in err


async def test_a_second_signal_ends_at_once() -> None:
    process = await start("-c", STUCK_CLOSING)
    assert process.stdout
    assert process.stderr
    try:
        async with asyncio.timeout(60):
            await process.stderr.readline()  # it reports, so its handler is there
            process.send_signal(signal.SIGINT)
            assert await process.stdout.readline() == b"closing\n"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130
    assert not out
    assert b"Traceback" not in err


@pytest.mark.parametrize(("answered", "attainment"), [(3, 1.0), (0, 0.0)])
def test_an_interrupted_request_is_not_judged(answered: int, attainment: float) -> None:
    traces = [Trace(0.0, 0.0, 1.0)] * answered + [Trace(0.0, 0.0, 0.5, error_kind=INTERRUPTED)] * 2
    slo = Slo(e2e_s=2.0)
    assert slo.attainment(traces) == attainment
    assert slo.goodput(LoadResult(2.0, tuple(traces))) == answered / 2
