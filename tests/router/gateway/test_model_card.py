"""What the gateway promises before any worker is asked."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import BatonConfig
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig
from router.gateway.model_card import ModelCard
from tests.tiny_models import tiny_model

BLOCK_SIZE = 32


@pytest.mark.parametrize(("num_blocks", "limit", "expected"), [(10_000, None, None), (2, None, 2 * BLOCK_SIZE), (2, 48, 48)])
def test_the_context_is_what_the_decode_pool_can_hold(num_blocks: int, limit: int | None, expected: int | None) -> None:
    """Else a request without max_tokens would ask for more than any worker could ever give."""
    model = ModelConfig.load(tiny_model("llama"))
    block_bytes = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, BLOCK_SIZE, "bf16").block_bytes
    decode = {"block_size": BLOCK_SIZE, "kv_cache_bytes": (num_blocks + 1) * block_bytes - 1}
    config = BatonConfig.model_validate({"model": "x", "max_model_len": limit, "decode": decode})
    card = ModelCard.of(config, model, name="x", created=0)
    assert card.max_model_len == (expected or model.max_position_embeddings)


@pytest.mark.parametrize(
    ("prefill", "decode", "name"),
    [
        ({}, {}, "baton-int8-kv_bf16-native"),
        ({"block_size": 64}, {"block_size": 16}, "baton-int8-kv_bf16-native"),  # moved unchanged
        ({"kv_dtype": "bf16"}, {"kv_dtype": "int8"}, "baton-int8-kv_bf16-native-to-int8-kv_int8-native"),
        ({"kernels": "torch"}, {}, "baton-int8-kv_bf16-torch-to-int8-kv_bf16-native"),
    ],
)
def test_a_pair_that_computes_or_rounds_differently_is_named(prefill: dict[str, Any], decode: dict[str, Any], name: str) -> None:
    config = BatonConfig.model_validate({"model": "x", "prefill": prefill, "decode": decode})
    card = ModelCard.of(config, ModelConfig.load(tiny_model("llama")), name="x", created=0)
    assert card.system_fingerprint == name
