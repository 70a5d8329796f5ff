"""The quality command: its text is long enough, its arguments are checked, its figures say what they say."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks.quality import Measured, divergence, parse_pair
from benchmarks.teacher_forcing import Continuations

PROSE = (Path(benchmarks.__file__).parent / "data" / "prose.txt").read_text(encoding="utf-8")


def test_text_is_varied_prose() -> None:
    paragraphs = [line for line in PROSE.splitlines() if line]
    words = re.findall(r"\w+|[^\w\s]", PROSE)
    assert len(words) > 9000  # a token is hardly ever more, so 8,192 can be scored after a context of 512
    assert len(set(paragraphs)) == len(paragraphs)
    assert len({word.lower() for word in words}) > 1500
    assert not any(line.lstrip().startswith(("-", "*", "#")) for line in paragraphs)


@pytest.mark.parametrize("pair", ["bf16/int8", "float32/float32", "int4+kv8/int8+kv8", "bf16/int4+kv8", "float32/bf16"])
def test_pairs(pair: str) -> None:
    assert parse_pair(pair) == pair


@pytest.mark.parametrize("pair", ["bf16", "bf16/", "bf16/int3", "bf16/float32", "a/b/c", "int8+kv8/int8", "float32+kv8/float32+kv8"])
def test_impossible_pairs_are_refused(pair: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_pair(pair)


def test_figures_are_relative_to_the_base() -> None:
    base = Continuations(torch.full((2, 4), 2.0, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.int64))
    worse = Continuations(torch.full((2, 4), 2.1, dtype=torch.float64), torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]]))
    figures = Measured("int8/int8", worse, 0.25, 1.0).figures(base)
    assert figures["perplexity_change"] == pytest.approx(torch.tensor(0.1).exp().item() - 1, abs=1e-4)
    assert figures["greedy_agreement"] == 7 / 8
    assert figures["divergence_nat"] == 0.25
    assert figures["num_scored_tokens"] == 8


def test_divergence_is_of_each_row() -> None:
    base, other = (torch.tensor(rows).log() for rows in ([[0.5, 0.5], [0.9, 0.1]], [[0.5, 0.5], [0.5, 0.5]]))
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    torch.testing.assert_close(divergence(base, other), torch.tensor([0.0, expected], dtype=torch.float64), atol=1e-6, rtol=0)
