"""What the decoder's C++ would take as an address or an index is refused by name before it gets there."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.engine.interrupt import Interrupt
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.native.kernels import NativeKernels
from cluster.engine.native.linear import Bf16Linear
from cluster.engine.rope import RotaryTable
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig
from tests.engine.native.formats import random
from tests.tiny_models import tiny_model

NUM_POSITIONS, NUM_BLOCKS, BLOCK_SIZE = 48, 5, 16


@pytest.fixture
def kernels(native: ModuleType) -> NativeKernels:
    return NativeKernels(native, 1)


@pytest.fixture
def config() -> ModelConfig:
    loaded = ModelConfig.load(tiny_model("llama"))
    return replace(loaded, num_layers=1, sliding_windows=loaded.sliding_windows[:1])


@pytest.fixture
def parts(config: ModelConfig) -> LayerParts[Any]:
    heads = config.num_heads * config.head_dim
    return LayerParts(
        attention_norm=torch.ones(config.hidden_size),
        qkv=linear(config.hidden_size, heads + 2 * config.num_kv_heads * config.head_dim),
        q_norm=None,
        k_norm=None,
        window=None,
        output=linear(heads, config.hidden_size),
        mlp_norm=torch.ones(config.hidden_size),
        gate_up=linear(config.hidden_size, 2 * config.intermediate_size),
        down=linear(config.intermediate_size, config.hidden_size),
    )


@pytest.fixture
def cache(kernels: NativeKernels, config: ModelConfig) -> KVCache:
    return make_cache(kernels, config, head_dim=config.head_dim)


@pytest.fixture
def batch() -> ForwardBatch:
    """One output token at position 31, and the first three of a prompt."""
    spans = (BatchSpan(0, 1, 31, (3, 4), is_prompt=False), BatchSpan(1, 3, 0, (1,), is_prompt=True))
    slots = torch.tensor([79, 16, 17, 18])
    return ForwardBatch(torch.tensor([5, 6, 7, 8]), torch.tensor([31, 0, 1, 2]), slots, torch.tensor([0]), spans)


def linear(in_features: int, out_features: int) -> Bf16Linear:
    return Bf16Linear.from_float(random(out_features, in_features))


def make_cache(kernels: NativeKernels, config: ModelConfig, *, head_dim: int) -> KVCache:
    layout = KVLayout(config.num_layers, config.num_kv_heads, head_dim, BLOCK_SIZE, "bf16", kernels.packing)
    return kernels.make_cache(layout, torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8))


def rotary(config: ModelConfig) -> RotaryTable:
    return RotaryTable(config.rope, config.head_dim, NUM_POSITIONS)


def spans_with(batch: ForwardBatch, index: int, **change: Any) -> tuple[BatchSpan, ...]:
    return tuple(replace(span, **change) if number == index else span for number, span in enumerate(batch.spans))


CHANGES: list[tuple[str, dict[str, Tensor], tuple[int, dict[str, Any]] | None]] = [
    ("positions", {"positions": torch.tensor([NUM_POSITIONS, 0, 1, 2])}, None),
    ("positions", {"positions": torch.tensor([31, -1, 1, 2])}, None),
    ("positions", {"positions": torch.tensor([31, 0, 1])}, None),
    ("positions", {"positions": torch.tensor([31, 0, 1, 2], dtype=torch.int32)}, None),
    ("slot_mapping", {"slot_mapping": torch.tensor([NUM_BLOCKS * BLOCK_SIZE, 16, 17, 18])}, None),
    ("slot_mapping", {"slot_mapping": torch.tensor([79, -1, 17, 18])}, None),
    ("block_ids", {}, (0, {"block_ids": (3, NUM_BLOCKS)})),
    ("block_ids", {}, (0, {"block_ids": (-1, 4)})),
    ("block_ids", {}, (1, {"block_ids": (NUM_BLOCKS,)})),
    ("spans", {}, (0, {"block_ids": (3,)})),
    ("spans", {}, (1, {"position": -1})),
    ("spans", {}, (1, {"position": 14})),
    ("spans", {}, (1, {"first_row": 2})),
    ("spans", {}, (1, {"num_tokens": 4})),
]


@pytest.mark.parametrize(("name", "tensors", "span"), CHANGES)
def test_a_step_that_would_leave_the_pool_is_refused(
    *,
    kernels: NativeKernels,
    config: ModelConfig,
    parts: LayerParts[Any],
    cache: KVCache,
    batch: ForwardBatch,
    name: str,
    tensors: dict[str, Any],
    span: tuple[int, dict[str, Any]] | None,
) -> None:
    decoder = kernels.make_decoder([parts], config, rotary(config))
    decoder(random(4, config.hidden_size), batch, cache, Interrupt())
    before = cache.storage.clone()
    spans = batch.spans if span is None else spans_with(batch, span[0], **span[1])
    with pytest.raises(ValueError, match=f"^{name}:"):
        decoder(random(4, config.hidden_size), replace(batch, spans=spans, **tensors), cache, Interrupt())
    assert torch.equal(cache.storage, before)


def test_hidden_rows_must_be_neighbours(
    kernels: NativeKernels, config: ModelConfig, parts: LayerParts[Any], cache: KVCache, batch: ForwardBatch
) -> None:
    decoder = kernels.make_decoder([parts], config, rotary(config))
    for hidden in (random(4, config.hidden_size + 16)[:, :-16], random(3, config.hidden_size), random(4, config.hidden_size).double()):
        with pytest.raises(ValueError, match=r"^hidden:"):
            decoder(hidden, batch, cache, Interrupt())


def test_a_cache_of_another_model_is_refused(
    kernels: NativeKernels, config: ModelConfig, parts: LayerParts[Any], batch: ForwardBatch
) -> None:
    decoder = kernels.make_decoder([parts], config, rotary(config))
    with pytest.raises(ValueError, match=r"^layout:"):
        decoder(random(4, config.hidden_size), batch, make_cache(kernels, config, head_dim=2 * config.head_dim), Interrupt())


@pytest.mark.parametrize("name", ["qkv", "output", "gate_up", "down"])
def test_linears_of_another_shape_are_refused(kernels: NativeKernels, config: ModelConfig, parts: LayerParts[Any], name: str) -> None:
    good = getattr(parts, name)
    for bad in (linear(good.in_features + 32, good.out_features), linear(good.in_features, good.out_features - 1)):
        changes: dict[str, Any] = {name: bad}
        with pytest.raises(ValueError, match=rf"^layers\.0\.{name}:"):
            kernels.make_decoder([replace(parts, **changes)], config, rotary(config))


def test_a_head_of_another_shape_is_refused(kernels: NativeKernels, config: ModelConfig) -> None:
    norm = torch.ones(config.hidden_size)
    kernels.make_head(norm, linear(config.hidden_size, config.vocab_size), config)
    with pytest.raises(ValueError, match=r"^lm_head:"):
        kernels.make_head(norm, linear(config.hidden_size, config.vocab_size - 1), config)
    with pytest.raises(ValueError, match=r"^norm:"):
        kernels.make_head(torch.ones(config.hidden_size + 32), linear(config.hidden_size, config.vocab_size), config)


def test_a_rotary_table_of_another_head_is_refused(kernels: NativeKernels, config: ModelConfig, parts: LayerParts[Any]) -> None:
    with pytest.raises(ValueError, match=r"^cos:"):
        kernels.make_decoder([parts], config, RotaryTable(config.rope, 2 * config.head_dim, NUM_POSITIONS))
