"""What is asked: the same token ids for libraries and servers, other ones in each round."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.comparison.cases import ENGINE_CASES, MIXED, VOCAB_SIZE, Case
from benchmarks.load.lengths import Fixed
from benchmarks.load.requests import RandomTokens


@pytest.mark.parametrize("case", [*ENGINE_CASES.values(), MIXED], ids=str)
def test_prompts_have_the_cases_shape(case: Case) -> None:
    prompts = case.prompts(seed=3)
    assert [len(prompt) for prompt in prompts] == [case.num_prompt_tokens] * case.num_prompts
    assert all(0 <= token < VOCAB_SIZE for prompt in prompts for token in prompt)
    assert prompts == case.prompts(seed=3)
    assert not set(prompts) & set(case.prompts(seed=4))


def test_a_server_is_asked_what_a_library_is_called_with() -> None:
    requests = RandomTokens(Fixed(MIXED.num_prompt_tokens), Fixed(MIXED.num_output_tokens), VOCAB_SIZE).requests(7)
    assert [request.prompt for request in islice(requests, MIXED.num_prompts)] == MIXED.prompts(7)


def test_a_rate_counts_answers_or_where_they_are_one_token_prompts() -> None:
    assert Case("decode", 8, 16, 128).num_counted == 8 * 128
    assert Case("prefill", 8, 512, 1).num_counted == 8 * 512
