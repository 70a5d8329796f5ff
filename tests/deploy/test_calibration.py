"""Smoothing factors of models in the cache: made once, and only where they are Baton's to keep."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.engine.smoothing import Smoothing
from cluster.errors import ConfigError
from cluster.model_config import SMOOTHING_FILE, ModelConfig, checkpoint_fingerprint
from deploy import calibration
from deploy.calibration import calibrate_cached
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the cache, without factors."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_model(), tmp_path / "cache" / "models" / "tiny"))


def test_factors_are_made_once(cached: Path) -> None:
    lines: list[str] = []
    plain = checkpoint_fingerprint(cached)
    calibrate_cached(cached, lines.append)
    assert Smoothing.load(cached, ModelConfig.load(cached)) is not None
    assert lines == ["calibrating int8 on 1024 tokens"]
    assert {path.name for path in cached.iterdir()} == {path.name for path in tiny_model().iterdir()} | {SMOOTHING_FILE}
    smoothed = checkpoint_fingerprint(cached)
    assert smoothed != plain
    calibrate_cached(cached, lines.append)
    assert len(lines) == 1, "the second time, from the cache alone"
    (cached / SMOOTHING_FILE).unlink()
    calibrate_cached(cached)
    assert checkpoint_fingerprint(cached) == smoothed, "any machine makes the same"


def test_a_folder_of_others_stays_as_it_is(cached: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cached, tmp_path / "own"))
    calibrate_cached(folder)
    assert not (folder / SMOOTHING_FILE).exists()


def test_pull_makes_them(cached: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "deploy.cli", "pull", str(cached)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{cached}\n"
    assert (cached / SMOOTHING_FILE).exists()


def test_a_tokenizer_that_cannot_be_read_is_named(cached: Path) -> None:
    (cached / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
        calibrate_cached(cached)
    assert not (cached / SMOOTHING_FILE).exists()


def test_a_cache_that_cannot_be_written_is_named(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(smoothing: Smoothing, path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Smoothing, "save", refuse)
    with pytest.raises(ConfigError, match=rf"cannot write .*{SMOOTHING_FILE}: Permission denied"):
        calibrate_cached(cached)


def test_the_text_is_ordinary_and_not_the_benchmarks() -> None:
    text = calibration.TEXT.read_text(encoding="utf-8")
    prose = (ROOT / "benchmarks" / "data" / "prose.txt").read_text(encoding="utf-8")
    paragraphs = [line for line in text.splitlines() if len(line) > 60]
    assert len(text.split()) > 1024, "a word is hardly ever less than a token"
    assert len(paragraphs) > 15
    assert not any(line in prose for line in paragraphs)
