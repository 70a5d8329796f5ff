"""In float32 the tokens are those of `transformers`, and the logprobs within 1e-4: the oracle of the whole path through the model."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import pytest
import torch

from cluster.engine.engine import Engine
from cluster.engine.events import Allocated, Token
from cluster.engine.scheduler import SchedulerLimits
from cluster.engine.sequence_factory import EngineIdentity
from cluster.types import OrderKey, Request, SamplingParams, TokenOutput
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import FAMILIES, VOCAB_SIZE, oracle, tiny_model

BLOCK_SIZE = 16
NUM_OUTPUTS = 64
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 75)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()) for length in LENGTHS)


@functools.cache
def expected(family: str, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Greedy tokens of `transformers`, and their logprobs."""
    model = oracle(family)
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_OUTPUTS, do_sample=False, eos_token_id=None, pad_token_id=0)
        logprobs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    output = ids[0, len(prompt) :]
    return output.tolist(), logprobs.gather(1, output[:, None])[:, 0].tolist()


def assert_same(family: str, prompt: tuple[int, ...], outputs: Seq[TokenOutput]) -> None:
    token_ids, logprobs = expected(family, prompt)
    assert [output.token_id for output in outputs] == token_ids
    assert [output.logprob for output in outputs] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kernels", ["reference", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_and_in_chunks(family: str, kernels: str) -> None:
    drive = ModelDrive(tiny_model(family), engine_config("float32", kernels=kernels, block_size=BLOCK_SIZE))
    sequences = [drive.sequence(prompt, max_tokens=NUM_OUTPUTS, num_logprobs=0) for prompt in prompts()]
    for prompt, outputs in zip(prompts(), drive.generate(sequences, chunk=23), strict=True):
        assert_same(family, prompt, outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_alone(family: str) -> None:
    drive = ModelDrive(tiny_model(family), engine_config("float32", block_size=BLOCK_SIZE))
    for prompt in prompts():
        (outputs,) = drive.generate([drive.sequence(prompt, max_tokens=NUM_OUTPUTS, num_logprobs=0)], chunk=1000)
        assert_same(family, prompt, outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_engine_with_and_without_a_prefix_hit(family: str) -> None:
    drive = ModelDrive(tiny_model(family), engine_config("float32", block_size=BLOCK_SIZE))
    built = drive.built
    identity = EngineIdentity(
        built.checkpoint, built.domain, VOCAB_SIZE, frozenset(built.model.config.eos_token_ids), built.max_model_len, prefix_caching=True
    )
    limits = SchedulerLimits(BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=48, num_reserved_blocks=2)
    engine = Engine(identity, limits, built.layout, drive.cache, drive.runner, num_swap_slots=8)
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, seed=0, temperature=0.0, ignore_eos=True, num_logprobs=0)
    for attempt in range(2):
        outputs: dict[str, list[TokenOutput]] = {}
        num_cached: dict[str, int] = {}
        for index, prompt in enumerate(prompts()):
            engine.add(Request(str(index), attempt, prompt, sampling, OrderKey(0.0, index)), stop_after_first_token=False)
        while engine.has_work:
            for key, event in engine.step():
                if isinstance(event, Token):
                    outputs.setdefault(key, []).append(event.output)
                elif isinstance(event, Allocated):
                    num_cached[key] = event.num_cached_tokens
        for index, prompt in enumerate(prompts()):
            assert_same(family, prompt, outputs[f"{index}/{attempt}"])
        assert (num_cached[f"4/{attempt}"] == 64) == (attempt == 1)
    engine.check_integrity()
