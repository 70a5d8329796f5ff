"""`baton doctor` over a real cluster: what it says after traffic, during it, and of the survivors of a worker that was killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.served import Served, serving
from tests.integration.test_cluster import MODEL, TALE, ask

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="function")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def application(serve_url: str) -> Iterator[Served]:
    """Two pools, one worker each."""
    with serving(serve_url, "doctor") as served:
        yield served


@pytest_asyncio.fixture
async def served(application: Served) -> AsyncIterator[Served]:
    """The application, and idle at the end."""
    await application.await_ready()
    yield application
    await application.await_balance()


def _doctor(served: Served, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "doctor", served.url, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


async def test_the_doctor_finds_it_balanced_after_traffic(served: Served) -> None:
    await asyncio.gather(*(ask(served, messages=TALE, max_tokens=8, seed=index) for index in range(4)))
    done = await asyncio.to_thread(_doctor, served, "--wait", "20")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("balanced: idle\n")
    for kind in ("gateway", "router", "prefill", "decode"):
        assert sum(kind in line.split() for line in done.stdout.splitlines()) == 1, done.stdout
    books = await served.processes()
    assert [len(process.pools) for process in books.processes if process.kind in ("prefill", "decode")] == [1, 1]


async def test_the_doctor_tells_running_requests_from_leaks(served: Served) -> None:
    async with served.client() as client:
        ask_for_more: Any = partial(client.chat.completions.create, model=MODEL, messages=TALE, max_tokens=1500, stream=True)
        streams = [await ask_for_more(extra_body={"ignore_eos": True}) for _ in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        done = await asyncio.to_thread(_doctor, served, "--json")
        for stream in streams:
            await stream.close()
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["findings"]) == (0, "balanced: 2 requests running", [])
    [decode] = [process for process in report["processes"] if process["kind"] == "decode"]
    assert decode["held"]["blocks_owned"] > 0


async def test_a_killed_prefill_worker_leaves_no_files_and_no_memory_with_the_others(served: Served) -> None:
    await ask(served)
    await served.await_balance()
    before = await served.states()
    [victim] = served.pids("Prefill")
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(1.0)
    await served.await_ready()
    await ask(served)  # the decode worker maps the new life's pool
    await served.await_no_more_files_than(before)
