"""A whole model through the native kernels: what its KV is, and what it may be shared with."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from cluster.config import EngineConfig
from tests.engine.model_drive import ModelDrive
from tests.harness import random_prompt
from tests.tiny_models import tiny_model

PROMPT = random_prompt(560)
SPLIT = 250  # the rest comes token by token
BLOCK_SIZE = 32


def drive(family: str, scheme: str, kv_dtype: str) -> ModelDrive:
    fields = {"scheme": scheme, "kv_dtype": kv_dtype, "kernels": "native", "block_size": BLOCK_SIZE}
    return ModelDrive(tiny_model(family), EngineConfig.model_validate(fields))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("family", ["qwen2-window", "qwen3"])
@pytest.mark.parametrize(("scheme", "kv_dtype"), [("bf16", "bf16"), ("int8", "bf16"), ("int4", "int8")])
def test_kv_of_decode_steps_is_that_of_a_prefill_where_it_is_shared(family: str, scheme: str, kv_dtype: str) -> None:
    """Over several tiles of keys, with heads large enough for every instruction set's own kernels."""
    model = drive(family, scheme, kv_dtype)
    if not model.built.kernels.shares_generated:
        pytest.skip("it is not shared here")
    whole, grown = model.sequence(PROMPT), model.sequence(PROMPT[:SPLIT], max_tokens=len(PROMPT) - SPLIT)
    model.logits([whole], [len(PROMPT)])
    model.logits([grown], [SPLIT])
    for token_id in PROMPT[SPLIT:]:
        grown.token_ids.append(token_id)
        model.logits([grown], [1])
    num_full = (len(PROMPT) - 1) // BLOCK_SIZE
    found, expected = (model.cache.read_blocks(sequence.block_table[:num_full]) for sequence in (grown, whole))
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("scheme", ["bf16", "int8", "int4"])
def test_rows_do_not_depend_on_chunks_and_neighbours(scheme: str) -> None:
    model = drive("qwen3", scheme, "bf16")
    alone = model.logits([model.sequence(PROMPT)], [len(PROMPT)])
    chunked, other = model.sequence(PROMPT), model.sequence(PROMPT[:40], max_tokens=9)
    assert alone is not None
    model.logits([other, chunked], [40, 1])
    other.token_ids.append(7)
    model.logits([other, chunked], [1, 300])
    found = model.logits([chunked], [len(PROMPT) - 301])
    assert found is not None and torch.equal(found, alone)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bf16", 0.1), ("int8", 0.1)])
def test_logits_are_near_those_of_torch(native: ModuleType, kv_dtype: str, bound: float) -> None:
    assert native.isa()
    oracle = ModelDrive(tiny_model("qwen3"), EngineConfig.model_validate({"scheme": "bf16", "kernels": "torch", "block_size": BLOCK_SIZE}))
    model = drive("qwen3", "bf16", kv_dtype)
    found, expected = (each.logits([each.sequence(PROMPT)], [len(PROMPT)]) for each in (model, oracle))
    assert found is not None and expected is not None
    assert (found.log_softmax(-1) - expected.log_softmax(-1)).square().mean().sqrt() < bound
