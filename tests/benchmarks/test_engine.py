"""The engine benchmark end to end on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine
from benchmarks.steps.bench import EngineBench
from benchmarks.steps.case import Case, DecodeCase, PrefillCase, make_cases
from benchmarks.steps.limits import MachineLimits, measure_limits
from cluster.config import EngineConfig
from cluster.errors import ConfigError
from cluster.model_config import ModelConfig
from tests.tiny_models import tiny_model

LIMITS = MachineLimits(10.0, {"int8_dot": 100.0, "float32_fma": 20.0, "int8_tile": 400.0})
SMALL = ["--batch", "1", "3", "--context", "20", "--prompt", "40", "--steps", "3", "--prompts", "2"]


@pytest.fixture(autouse=True)
def num_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    results = tmp_path / "results.jsonl"
    code = engine.main(["--model", str(tiny_model("llama")), "--results", str(results), *options])
    return code, json.loads(results.read_text()) if results.exists() else {}


def test_compares_kernels_and_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(engine, "measure_limits", lambda num_threads: LIMITS)
    profile = tmp_path / "profile.txt"
    code, result = run(tmp_path, *SMALL, "--scheme", "int8", "--kernels", "torch", "--compare", "reference", "--profile", str(profile))
    assert code == 0
    assert [(item["case"], item.get("batch"), item["kernels"].split("-")[0]) for item in result["cases"]] == [
        (kind, batch, kernels) for kind, batch in (("decode", 1), ("decode", 3), ("prefill", None)) for kernels in ("torch", "reference")
    ]
    for item in result["cases"]:
        assert 0 < item["kernels_s"] < item["step_s"] and item["min_step_s"] <= item["step_s"]
        assert item["gb_per_s"] == pytest.approx(item["read_bytes"] / item["step_s"] / 1e9, rel=1e-4)
        assert item["share_of_read"] == pytest.approx(item["gb_per_s"] / 10)
        assert item["share_of_peak"] == pytest.approx(item["gop_per_s"] / 400)
    assert result["scheme"] == "int8" and result["limits"]["read_gb_per_s"] == 10
    assert "reference / torch" in capsys.readouterr().out
    assert profile.read_text().count("Self CPU") >= 6


def test_weights_are_counted_as_held() -> None:
    folder, config = tiny_model("llama"), ModelConfig.load(tiny_model("llama"))
    qkv = config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = qkv + config.num_heads * config.head_dim * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    bench = make_bench("bf16", "torch", [DecodeCase(2, 5)])
    bench.start(DecodeCase(2, 5))
    cost = bench.sample().cost
    num_weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    kv_bytes = 2 * 6 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    assert cost.read_bytes == 2 * num_weights + kv_bytes
    assert cost.linear_operations == 2 * 2 * num_weights
    assert folder.exists()


def make_bench(scheme: str, kernels: str, cases: list[Case], **more: object) -> EngineBench:
    config = EngineConfig.model_validate({"scheme": scheme, "kernels": kernels, "kv_cache_bytes": "1MiB", "swap_bytes": "1MiB", **more})
    return EngineBench(config, tiny_model("llama"), cases, 5)


def test_room_grows_with_the_cases_and_is_free_between_them() -> None:
    large = DecodeCase(20, 600)
    bench = make_bench("bf16", "torch", [large, PrefillCase(100)], max_num_seqs=4, max_num_batched_tokens=32)
    for case in (large, PrefillCase(100), large):
        bench.start(case)
        first, second = bench.sample(), bench.sample()
        bench.finish()
        if isinstance(case, DecodeCase):
            assert second.cost.attention_operations > first.cost.attention_operations  # contexts grow
        else:
            assert second.cost == first.cost  # nothing was found in a prefix cache


def test_cases_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="1025 tokens, the model's context has 1024"):
        make_bench("bf16", "torch", [DecodeCase(1, 1019)])


def test_cases_are_every_batch_with_every_context_and_the_prompts() -> None:
    assert make_cases([1, 2], [3, 4], [5]) == [DecodeCase(1, 3), DecodeCase(2, 3), DecodeCase(1, 4), DecodeCase(2, 4), PrefillCase(5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernels", "torch", "--compare", "torch"], "compare: the kernels are torch already"),
        (["--scheme", "bf16", "--kv-dtype", "float32"], "kv_dtype: float32 does not go with scheme bf16"),
        (["--scheme", "int8", "--kv-dtype", "int8", "--kernels", "torch"], "kv_dtype: int8/rows blocks are not supported"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(engine, "measure_limits", lambda num_threads: LIMITS)
    code, _ = run(tmp_path, *SMALL, *options)
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--batch", "0"], ["--threads", "1000"], ["--batch", "--prompt"], ["--scheme", "int3"]])
def test_bad_options_are_refused_by_argparse(tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, *options)
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_peak_is_that_of_the_fastest_instruction_for_a_scheme() -> None:
    assert LIMITS.peak_for("int8") == LIMITS.peak_for("int4") == 400
    assert LIMITS.peak_for("bf16") == LIMITS.peak_for("float32") == 20
    assert MachineLimits(10.0, {}).peak_for("int8") is None
    with_nibbles = MachineLimits(10.0, {"int4_dot": 150.0, "int8_dot": 100.0, "float32_fma": 20.0})
    assert (with_nibbles.peak_for("int4"), with_nibbles.peak_for("int8")) == (150, 100)


def test_the_better_of_two_limits_counts() -> None:
    later = MachineLimits(11.0, {"int8_dot": 90.0, "float32_fma": 30.0, "int8_tile": 400.0})
    assert LIMITS.best(later) == MachineLimits(11.0, {"int8_dot": 100.0, "float32_fma": 30.0, "int8_tile": 400.0})


def test_limits_of_this_machine() -> None:
    limits = measure_limits(1)
    if limits is None:
        pytest.skip("no native kernels on this machine")
    assert 0.5 < limits.read_gb_per_s < 2000
    assert all(1 < peak < 1e6 for peak in limits.peak_gop_per_s.values())
