from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.engine.gumbel import gumbel, noise_key
from cluster.engine.kept_set import keep_likeliest
from cluster.engine.logits_processor import LogitsProcessor, SampleRow
from cluster.engine.sampler import Sampler
from cluster.types import SamplingParams

EOS = 2


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "seed": 0} | fields))  # type: ignore[arg-type]


def row(token_ids: tuple[int, ...] = (5, 6, 7), num_prompt_tokens: int = 2, **fields: object) -> SampleRow:
    return SampleRow(params(**fields), token_ids, num_prompt_tokens)


def sample(logits: Tensor, *rows: SampleRow) -> list[int]:
    return [output.token_id for output in Sampler([EOS]).sample(logits, rows)]


# ---- randomness --------------------------------------------------------------------------------------------------------


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -3.0])
    temperature, num_draws = 0.7, 40_000
    rows = [row((1,) * 3, seed=seed, temperature=temperature) for seed in range(num_draws)]
    drawn = torch.tensor(sample(logits.expand(num_draws, -1), *rows))
    probabilities = (logits / temperature).softmax(-1)
    counts = drawn.bincount(minlength=len(logits))
    chi_squared = ((counts - num_draws * probabilities).square() / (num_draws * probabilities)).sum()
    assert chi_squared < 20.5  # 99.9 % of chi squared with 5 degrees of freedom


def test_draws_at_successive_positions_are_independent() -> None:
    num_draws = 20_000
    rows = [row((1,) * (2 + position), seed=9) for position in range(num_draws)]
    drawn = torch.tensor(sample(torch.zeros(num_draws, 4), *rows))
    pairs = (drawn[:-1] * 4 + drawn[1:]).bincount(minlength=16)
    expected = (num_draws - 1) / 16
    assert ((pairs - expected).square() / expected).sum() < 37.7  # 99.9 % with 15 degrees of freedom


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = gumbel([noise_key(seed, 0, 0) for seed in range(40)], 49_152)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    assert noise.amax(dim=-1).mean().item() == pytest.approx(math.log(49_152) + 0.5772, abs=0.6)


def test_noise_depends_on_seed_choice_position_and_token_alone() -> None:
    keys = [noise_key(*key) for key in itertools.product((0, 1, 2**63), (0, 1), (0, 1, 5000))]
    assert len(set(keys)) == len(keys)
    noise = gumbel(keys, 300)
    for index, key in enumerate(keys):
        assert torch.equal(gumbel([key], 300)[0], noise[index]) and torch.equal(gumbel([key], 77)[0], noise[index, :77])
    correlation = torch.corrcoef(gumbel(keys, 20_000)) - torch.eye(len(keys))
    assert correlation.abs().max() < 0.05


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_row_is_sampled_as_if_alone(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([50, 1030, 3001]))
    num_rows = data.draw(st.integers(2, 6))
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 3
    rows = [
        row(
            tuple(data.draw(st.lists(st.integers(0, 49), min_size=2, max_size=6))),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])),
            top_k=data.draw(st.sampled_from([0, 0, 1, 3, 40, 1025])),
            top_p=data.draw(st.sampled_from([1.0, 0.2, 0.9, 0.9999])),
            min_p=data.draw(st.sampled_from([0.0, 0.1])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
            num_logprobs=data.draw(st.sampled_from([None, 0, 3])),
        )
        for _ in range(num_rows)
    ]
    together = Sampler([EOS]).sample(logits, rows)
    alone = [Sampler([EOS]).sample(logits[index : index + 1].clone(), [rows[index]])[0] for index in range(num_rows)]
    assert together == alone


# ---- which tokens are kept ---------------------------------------------------------------------------------------------


def plain_kept(logits: list[float], sampling: SamplingParams) -> set[int]:
    """One row, token by token."""
    order = sorted(range(len(logits)), key=lambda token_id: -logits[token_id])
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = {token_id: math.exp(logits[token_id] - logits[order[0]]) for token_id in order}
    total, mass, nucleus = sum(weights[token_id] for token_id in kept), 0.0, []
    for token_id in kept:
        if sampling.top_p < 1 and mass >= sampling.top_p * total:
            break
        nucleus.append(token_id)
        mass += weights[token_id]
    return {token_id for token_id in nucleus if weights[token_id] >= sampling.min_p}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_kept_set_is_the_plain_one(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([10, 1500, 2500]))
    scale = data.draw(st.sampled_from([0.01, 1.0, 5.0]))
    sampled = [
        params(
            top_k=data.draw(st.sampled_from([0, 1, 2, 7, 1023, 1024, 1025, 2000, 10**6])),
            top_p=data.draw(st.sampled_from([1.0, 1e-9, 0.3, 0.77, 0.95])),
            min_p=data.draw(st.sampled_from([0.0, 0.0, 0.013, 0.5])),
        )
        for _ in range(3)
    ]
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))) * scale
    before = logits.tolist()
    keep_likeliest(logits, sampled)
    for index, sampling in enumerate(sampled):
        kept = set(logits[index].isfinite().nonzero()[:, 0].tolist())
        # sums in another order may move the cut of top-p by one token
        assert len(kept ^ plain_kept(before[index], sampling)) <= (1 if sampling.top_p < 1 else 0)
        assert kept and all(logits[index, token_id].item() == before[index][token_id] for token_id in kept)


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    keep_likeliest(logits, [params(top_k=2)])
    assert logits.isfinite().tolist() == [[False, True, True, True, True, False]]


# ---- what a request does to its logits ---------------------------------------------------------------------------------


def test_untouched_logits_are_not_copied() -> None:
    logits = torch.randn(2, 10)
    assert LogitsProcessor([EOS])(logits, [row(), row(min_tokens=1)]) is logits


def test_rules_touch_their_row_alone() -> None:
    logits = torch.arange(-4.0, 6.0).repeat(5, 1)
    before = logits.clone()
    rows = [
        row(logit_bias=((3, 10.0), (4, -100.0))),
        row((0, 9, 9, 1), 1, repetition_penalty=2.0),
        row((0, 9, 9, 1), 1, presence_penalty=0.5, frequency_penalty=0.25),
        row(min_tokens=2, stop_token_ids=(8,)),
        row(min_tokens=2, stop_token_ids=(8,), ignore_eos=True),
    ]
    result = LogitsProcessor([EOS])(logits, rows)
    assert torch.equal(logits, before)
    assert result[0].tolist() == [-4, -3, -2, 9, -100, 1, 2, 3, 4, 5]
    assert result[1].tolist() == [-8, -6, -2, -1, 0, 1, 2, 3, 4, 2.5]
    assert result[2].tolist() == [-4, -3.75, -2, -1, 0, 1, 2, 3, 4, 4]
    assert result[3].tolist() == [-4, -3, -math.inf, -1, 0, 1, 2, 3, -math.inf, 5]
    assert result[4].tolist() == [-4, -3, -2, -1, 0, 1, 2, 3, -math.inf, 5]


def test_min_tokens_counts_the_output() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    assert sample(logits, row((1, 1, 1, 1), 2, temperature=0.0, min_tokens=3)) == [1]
    assert sample(logits, row((1, 1, 1, 1), 2, temperature=0.0, min_tokens=2)) == [EOS]


# ---- logprobs ----------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) * 2
    raw = logits.log_softmax(-1)
    rows = [
        row(temperature=0.0, num_logprobs=2, logit_bias=((17, 100.0),)),
        row(temperature=3.0, num_logprobs=0, top_k=5),
        row(temperature=0.0),
    ]
    biased, drawn, silent = Sampler([EOS]).sample(logits, rows)
    likeliest = raw[0].topk(2)
    assert biased.token_id == 17 and biased.logprob == raw[0, 17].item()
    assert biased.top_logprobs == tuple(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
    assert drawn.logprob == raw[1, drawn.token_id].item() and drawn.top_logprobs == ()
    assert silent.logprob is None and silent.token_id == int(logits[2].argmax())


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(1, 100)
    assert sample(logits, row(temperature=1e-30)) == [int(logits.argmax())]
