"""`baton bench` from its command line to its JSON line, against the scripted server."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks.load.options import add_options
from benchmarks.load.plan import plan_of, transport_of
from benchmarks.serve import main
from cluster.errors import ConfigError
from tests.benchmarks.fake_inference import FakeInference, serving
from tests.benchmarks.fake_openai import FakeOpenAI, Script, served
from tests.conftest import free_port

QUICK = ("--input-tokens", "5", "--output-tokens", "4", "--warm-up", "1")
README = Path(benchmarks.__file__).parent / "README.md"
PNG = b"\x89PNG\r\n\x1a\n"


async def bench(fake: FakeOpenAI, *arguments: str) -> int:
    """The command runs its own event loop, so it gets its own thread."""
    async with served(fake) as url:
        return await asyncio.to_thread(main, [url, *QUICK, *arguments])


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


async def test_an_open_loop_appends_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "new" / "results.jsonl"
    slo = ("--slo", "ttft=5", "--slo", "e2e=5")
    fake = FakeOpenAI(Script(), Script(), Script(status=429), Script())
    for _ in range(2):
        assert await bench(fake, "--requests", "10", "--rate", "200", "--burst", "2", *slo, "--results", str(results)) == 0
    first, second = map(json.loads, results.read_text().splitlines())
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == second
    assert (first["num_requests"], first["num_answered"], first["errors"]) == (10, 9, {"http_429": 1})
    assert first["attainment"] == 0.9
    assert second["attainment"] == 1.0
    assert first["num_output_tokens"] == 36
    assert first["loop"] == {"rate": 200.0, "burst": 2}
    assert first["slo"] == {"ttft_s": 5.0, "e2e_s": 5.0}
    assert first["hardware"]["cores"] >= 1
    assert "1 failed with http_429: the queue is full" in printed.out
    assert "warm-up" in printed.err


async def test_a_search_finds_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOpenAI()
    assert await bench(fake, "--requests", "3", "--search", "--rate", "500", "--slo", "ttft=5") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["search"]["highest_rate"] == 500 * 2**11  # a server without a limit: every probe doubles
    assert not found["search"]["settled"]
    assert [probe["attainment"] for probe in found["search"]["probes"]] == [1.0] * 12
    assert len({tuple(seen.body["prompt"]) for seen in fake.seen}) == 1 + 12 * 3  # no cache may know them


async def test_grpc_is_searched_judged_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.png"
    fake = FakeInference()
    async with serving(fake) as target:
        search = ("--search", "--rate", "500", "--requests", "3", "--slo", "ttft=5", "--plot", str(picture), "--body", '{"priority": 2}')
        assert await asyncio.to_thread(main, [f"grpc://{target}", *QUICK, *search]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"] == "tiny"
    assert (found["num_answered"], found["num_prompt_tokens"], found["num_output_tokens"]) == (3, 15, 12)
    assert len(found["search"]["probes"]) == 12
    assert not found["interrupted"]
    assert all(request.priority == 2 and request.ignore_eos for request in fake.seen)
    assert picture.read_bytes().startswith(PNG)


async def test_a_search_may_find_none(capsys: pytest.CaptureFixture[str]) -> None:
    await bench(FakeOpenAI(Script(), Script(status=503)), "--requests", "2", "--search", "--rate", "200000", "--slo", "ttft=5")
    printed = capsys.readouterr().out
    assert "no rate that was tried attains 90%" in printed
    assert json.loads(printed.splitlines()[-1])["search"]["highest_rate"] == 0


async def test_nothing_answered_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(FakeOpenAI(Script(status=500))) == 1
    assert "http_500" in capsys.readouterr().err
    assert await bench(FakeOpenAI(Script(), Script(ending="drop")), "--requests", "2") == 1
    assert await asyncio.to_thread(main, [f"http://127.0.0.1:{free_port()}"]) == 1
    assert "does not answer (connect)" in capsys.readouterr().err


async def test_results_that_cannot_be_kept_are_still_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(FakeOpenAI(), "--requests", "1", "--results", str(tmp_path)) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["num_answered"] == 1
    assert "could not be kept" in printed.err


async def test_a_dataset_is_asked_once(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {index}", "max_tokens": index + 1}) + "\n" for index in range(3)))
    fake = FakeOpenAI()
    assert await bench(fake, "--dataset", str(file), "--api", "chat", "--warm-up", "0", "--concurrency", "1") == 0
    assert [seen.body["messages"][0]["content"] for seen in fake.seen] == ["question 0", "question 1", "question 2"]
    assert [seen.body["max_tokens"] for seen in fake.seen] == [1, 2, 3]


async def test_a_search_rotates_through_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {index}", "max_tokens": 4}) + "\n" for index in range(40)))
    arguments = ("--dataset", str(file), "--requests", "3", "--search", "--rate", "500", "--slo", "ttft=5", "--warm-up", "2")
    enough = FakeOpenAI()
    assert await bench(enough, *arguments) == 0
    asked = [seen.body["prompt"] for seen in enough.seen]
    assert sorted(asked[:2]) == ["question 38", "question 39"], "the warm-up takes the last ones"
    assert sorted(asked[2:]) == sorted(f"question {index}" for index in range(12 * 3)), "no prompt comes again"
    assert "prompts of the dataset" not in capsys.readouterr().out
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:30]))
    assert await bench(FakeOpenAI(), *arguments) == 0
    printed = capsys.readouterr()
    said = "6 of 36 prompts of the dataset were sent again"
    assert any(warning.startswith(said) for warning in json.loads(printed.out.splitlines()[-1])["warnings"])
    assert printed.err.count(said) == 1


async def test_draws_latency_over_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "load.png"
    fake = FakeOpenAI(Script(), Script(), Script(status=429), Script())
    assert await bench(fake, "--requests", "5", "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(PNG)


def test_a_missing_matplotlib_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.load.plot.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert main([f"http://127.0.0.1:{free_port()}", "--plot", "load.png"]) == 2
    assert "requirements/bench.txt" in capsys.readouterr().err


@pytest.mark.parametrize("command", re.findall(r"(?m)^baton bench (.*)$", README.read_text(encoding="utf-8")))
def test_commands_of_the_readme_parse(command: str) -> None:
    options = parsed(*shlex.split(command))
    options.dataset = None  # of the reader
    assert plan_of(options)
    assert transport_of(options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--burst", "2"], "--burst needs --rate"),
        (["--search"], "--search needs an SLO"),
        (["--search", "--slo", "ttft=1", "--concurrency", "2"], "not with --concurrency"),
        (["--slo", "speed=1"], "--slo 'speed=1': expected one each of ttft"),
        (["--dataset", "no-such-file"], "no-such-file"),
        (["ftp://host"], "expected http://"),
        (["127.0.0.1:8000"], "expected http://"),
        (["grpc://host"], "expected grpc://HOST:PORT"),
        (["grpc://host:port"], "expected grpc://HOST:PORT"),
        (["grpc://host:9000/v1"], "expected grpc://HOST:PORT"),
        (["grpc://host:9000", "--api", "chat"], "--api chat: Baton's gRPC API has no chats"),
        (["grpc://host:9000", "--body", '{"n": 1}'], "--body: n: GenerateRequest"),
        (["http://"], "expected http://"),
    ],
)
def test_options_that_cannot_be(arguments: Sequence[str], message: str) -> None:
    options = parsed(*arguments)
    with pytest.raises(ConfigError, match=message):
        (plan_of(options), transport_of(options))


@pytest.mark.parametrize(
    "arguments",
    [["--rate", "0"], ["--rate", "1", "--concurrency", "1"], ["--requests", "0"], ["--input-tokens", "uniform:5:1"], ["--body", "[]"],
     ["--attain", "1.5"], ["--vocab-size", "256"], ["--body", "{"]],
)  # fmt: skip
def test_a_wrong_value_is_a_usage_error(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(*arguments)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_chat_takes_no_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"prompt": [1, 2], "max_tokens": 1}))
    with pytest.raises(ConfigError, match="token ids"):
        plan_of(parsed("--api", "chat", "--dataset", str(file)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], 100), (["--requests", "7"], 7), (["--duration", "5"], 2**62), (["--duration", "5", "--requests", "7"], 7)],
)
def test_budget(arguments: Sequence[str], expected: int) -> None:
    budget: Any = plan_of(parsed(*arguments)).budget
    assert budget.num_requests == expected
