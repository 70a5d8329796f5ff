"""`goodput` and `interference` from the command line to the line of JSON, with a script in the place of vLLM's Python."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import goodput_part, interference_part
from benchmarks.peers import main
from tests.benchmarks.comparison.fake_vllm import install_fake_vllm
from tests.conftest import free_port

_SERVER = """
import asyncio, json, sys
from aiohttp import web

async def answer(request):
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    events = [{"choices": [{"text": "ab"}]} for _ in range(body["max_tokens"])]
    events += [{"choices": [{"text": "", "finish_reason": "length"}]}]
    events += [{"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}}]
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        await asyncio.sleep(0.002)
    return response

async def models(request):
    return web.json_response({"data": [{"id": "tiny"}]})

app = web.Application()
app.router.add_post("/v1/completions", answer)
app.router.add_get("/v1/models", models)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)
"""


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, script: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, results = _start(tmp_path, monkeypatch, part, script, *arguments)
    return code, json.loads(results.read_text())


def _start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, script: str, *arguments: str) -> tuple[int, Path]:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)  # the rest of the tests keep their cores
    for module in (goodput_part, interference_part):
        monkeypatch.setattr(module, "_CLUSTERS", ())
    model = install_fake_vllm(tmp_path, monkeypatch, script)
    for name in ("config.json", "tokenizer.json"):
        (model / name).touch()
    results = tmp_path / "results.jsonl"
    options = ["--model", str(model), "--rounds", "1", "--port", str(free_port()), "--results", str(results), *arguments]
    return main([part, *options]), results


def test_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = _run(tmp_path, monkeypatch, "goodput", _SERVER, "--requests", "4", "--first-rate", "vllm=200")
    assert code == 0
    probes = found["probes"]["vllm"]
    assert probes[0]["rate"] == 200.0
    assert found["cases"]["goodput"]["medians"]["vllm"] == max([probe["rate"] for probe in probes if probe["attained"]], default=0.0)
    assert found["load"] == {"requests": 4, "slo": {"ttft_s": 2.0, "tpot_s": 0.05}, "attain": 0.9, "grid": 0.1}


def test_an_interrupt_ends_the_whole_of_goodput_not_one_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "    body = await request.json()\n"
    at_the_fourth = "    seen.append(1)\n    if len(seen) == 4:\n        os.kill(os.getppid(), signal.SIGINT)\n"  # two are the warm-up
    script = "import os, signal\nseen = []\n" + _SERVER.replace(answer, answer + at_the_fourth)
    code, results = _start(tmp_path, monkeypatch, "goodput", script, "--requests", "40", "--first-rate", "vllm=5")
    assert code == 130
    assert not results.exists()


def test_interference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _run(tmp_path, monkeypatch, "interference", _SERVER, "--seconds", "0.5")
    assert code == 0
    (taken,) = found["found"]["vllm"]
    assert taken["num_prompts"] >= 1
    assert found["cases"]["interference"]["medians"]["vllm"] == pytest.approx(taken["busy_p99_s"] / taken["quiet_p99_s"], abs=1e-3)
    assert "p99: with / without" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _run(tmp_path, monkeypatch, "goodput", "raise SystemExit('RuntimeError: no AVX-512')")
    assert code == 1
    assert found["cases"]["goodput"]["errors"] == {"vllm": "it did not start: RuntimeError: no AVX-512"}
    assert "vllm, goodput: it did not start: RuntimeError: no AVX-512" in capsys.readouterr().out
