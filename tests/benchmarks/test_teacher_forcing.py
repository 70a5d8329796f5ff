"""Teacher forcing through two engines' models against `transformers` on the whole text at once."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.teacher_forcing import Continuations, continue_windows, cut_windows
from cluster.config import EngineConfig
from cluster.engine.model_build import BuiltModel, build_model
from cluster.errors import TicketMismatch
from tests.tiny_models import VOCAB_SIZE, oracle, tiny_model

CONTEXT, STEPS = 37, 12  # the context ends within a block
WINDOWS = cut_windows([random.Random(3).randrange(VOCAB_SIZE) for _ in range(200)], CONTEXT, STEPS, 3)


def _built(scheme: str = "float32", block_size: int = 16) -> BuiltModel:
    kv_dtype = "float32" if scheme == "float32" else "bf16"
    config = EngineConfig.model_validate({"scheme": scheme, "kv_dtype": kv_dtype, "kernels": "reference", "block_size": block_size})
    return build_model(config, tiny_model("llama"))


def _run(prefill: BuiltModel, decode: BuiltModel, windows: list[list[int]] = WINDOWS) -> Continuations:
    steps: list[tuple[int, int]] = []
    found = continue_windows(prefill, decode, windows, CONTEXT, lambda step, logits: steps.append((step, len(logits))))
    assert steps == [(step, len(windows)) for step in range(STEPS)]
    return found


def test_float32_pair_equals_transformers() -> None:
    found = _run(_built(), _built())
    with torch.inference_mode():
        logits = oracle("llama")(torch.tensor(WINDOWS)).logits[:, CONTEXT:-1].double()
    targets = torch.tensor(WINDOWS)[:, CONTEXT + 1 :]
    losses = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(found.losses, losses, atol=1e-4, rtol=0)
    assert torch.equal(found.choices, logits.argmax(-1))
    assert found.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-4)


def test_context_is_the_prefill_models() -> None:
    bf16, int8 = _built("bf16"), _built("int8")
    pure, mixed = _run(int8, int8), _run(bf16, int8)
    assert not torch.equal(pure.losses, mixed.losses)
    torch.testing.assert_close(pure.losses, mixed.losses, atol=0.5, rtol=0)


def test_windows_do_not_touch_each_other() -> None:
    built = _built()
    together = _run(built, built)
    alone = _run(built, built, WINDOWS[1:2])
    torch.testing.assert_close(together.losses[1:2], alone.losses, atol=1e-4, rtol=0)


def test_the_block_size_of_prefill_changes_nothing() -> None:
    same, smaller = _run(_built(block_size=32), _built(block_size=32)), _run(_built(block_size=16), _built(block_size=32))
    torch.testing.assert_close(smaller.losses, same.losses, atol=1e-4, rtol=0)


def test_kv_in_fewer_bits_is_refused() -> None:
    with pytest.raises(TicketMismatch, match="kv_dtype"):
        _run(_built("bf16"), _built("float32"))


def test_windows_score_every_token_once() -> None:
    text = list(range(100))
    windows = cut_windows(text, 20, 10, 7)
    scored = [token for window in windows for token in window[21:]]
    assert scored == text[21:91]
    assert all(len(window) == 31 and window[0] == 10 * index for index, window in enumerate(windows))


def test_a_short_text_is_refused() -> None:
    assert len(cut_windows(list(range(91)), 20, 10, 7)) == 7
    with pytest.raises(ValueError, match="91 are needed"):
        cut_windows(list(range(90)), 20, 10, 7)


def test_agreement_counts_positions() -> None:
    losses = torch.zeros(1, 4, dtype=torch.float64)
    base = Continuations(losses, torch.tensor([[1, 2, 3, 4]]))
    assert Continuations(losses, torch.tensor([[1, 2, 0, 4]])).agreement(base) == 0.75
    assert base.agreement(base) == base.perplexity == 1.0
