"""What a step has to do, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.steps.cost import CostModel, StepCost, WeightTotals
from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig
from tests.tiny_models import tiny_model

CONFIG = replace(ModelConfig.load(tiny_model("llama")), num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, sliding_windows=(None, 3))
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, kv_dtype="bf16")
TOKEN_BYTES = 2 * 2 * 16 * 2  # of one layer: K and V of 2 heads


def cost_of(*spans: BatchSpan, num_samples: int, layout: KVLayout = LAYOUT) -> StepCost:
    num_tokens = sum(span.num_tokens for span in spans)
    rows = torch.zeros(num_tokens, dtype=torch.int64)
    batch = ForwardBatch(rows, rows, rows, rows[:num_samples], spans)
    return CostModel(CONFIG, layout, WeightTotals(5000, 1000), WeightTotals(700, 300)).step(batch)


def test_decode_reads_weights_once_and_each_context() -> None:
    cost = cost_of(BatchSpan(0, 1, 9, (0,), False), BatchSpan(1, 1, 1, (1,), False), num_samples=2)
    assert cost.read_bytes == 5000 + 700 + TOKEN_BYTES * (10 + 2) + TOKEN_BYTES * (3 + 2)
    assert cost.linear_operations == 2 * (1000 * 2 + 300 * 2)
    assert cost.attention_operations == 2 * 2 * 4 * 16 * ((10 + 2) + (3 + 2))


def test_prompt_sees_what_is_before_each_token() -> None:
    cost = cost_of(BatchSpan(0, 4, 2, (0,), True), num_samples=0)
    assert cost.read_bytes == 5000 + TOKEN_BYTES * 6 + TOKEN_BYTES * 6  # the window of token 2 reaches back to token 0
    assert cost.linear_operations == 2 * 1000 * 4
    assert cost.attention_operations == 2 * 2 * 4 * 16 * ((3 + 4 + 5 + 6) + 4 * 3)


def test_window_leaves_out_what_a_chunk_does_not_see() -> None:
    cost = cost_of(BatchSpan(0, 2, 8, (0,), True), num_samples=1)
    assert cost.read_bytes == 5700 + TOKEN_BYTES * 10 + TOKEN_BYTES * 4  # tokens 6 to 9


def test_scales_and_padding_are_read_too() -> None:
    int8 = replace(LAYOUT, kv_dtype="int8")
    cost = cost_of(BatchSpan(0, 1, 0, (0,), False), num_samples=1, layout=int8)
    assert int8.head_stride == 16 * 16 + 64
    assert cost.read_bytes == 5700 + 2 * 4 * int8.head_stride // 16


def test_costs_add_up() -> None:
    assert StepCost(1, 2, 3) + StepCost(10, 20, 30) == StepCost(11, 22, 33)
    assert StepCost(1, 2, 3).operations == pytest.approx(5)
