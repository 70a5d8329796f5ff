"""Promise P0 at its root: the bits of a row do not depend on the other rows, their number, or how a prompt is cut into chunks.

Inputs are made to cancel, so that another order of a sum changes the result visibly: random inputs hide nearly all differences behind
the rounding to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.engine.operations import make_operations
from cluster.engine.operations.cpu_attention import padded_context, padded_queries
from cluster.engine.quantization import make_scheme
from cluster.engine.row_kv_cache import RowKVCache
from cluster.kv_layout import KVLayout
from tests.engine.model_drive import ModelDrive, engine_config
from tests.tiny_models import FAMILIES, tiny_model

OPERATIONS = make_operations("torch")
NUM_ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 63, 64, 65, 127, 200)


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One, or what the test's `num_threads` parameter says: threads share out rows and change where vectors begin."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


with_1_and_2_threads = pytest.mark.parametrize("num_threads", [1, 2], indirect=True)


def cancelling(rows: int, columns: int, *, is_weight: bool, generator: torch.Generator) -> Tensor:
    """Products of such rows with such weights nearly sum to zero."""
    half = torch.randn(rows, columns // 2, generator=generator)
    other = torch.randn(rows, columns % 2, generator=generator)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return torch.cat([half, -half if is_weight else half, other * 1e-3], dim=1)[:, order].contiguous()


def assert_rows_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = function(x.clone())
    for number in NUM_ROWS:
        for first in (0, 1, 37):
            part = x[first : first + number]
            assert torch.equal(function(part.clone()), whole[first : first + number]), f"{number} rows from {first}"


@with_1_and_2_threads
@pytest.mark.parametrize("scheme", ["bf16", "int8"])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 576), (97, 131), (4096, 256), (96, 352)])
def test_linear(scheme: str, in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = cancelling(out_features, in_features, is_weight=True, generator=generator)
    bias = torch.randn(out_features, generator=generator)
    linear = make_scheme(scheme).make_linear(weight, bias, OPERATIONS)
    assert_rows_alone(linear, cancelling(300, in_features, is_weight=False, generator=generator))


@with_1_and_2_threads
@pytest.mark.parametrize("size", [96, 100, 576, 1536, 4096])
def test_norm(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator)
    assert_rows_alone(lambda x: OPERATIONS.rms_norm(x, weight, 1e-5), torch.randn(300, size, generator=generator))


def test_head_norm_of_a_fused_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, generator=generator)
    heads = torch.randn(300, 10, 32, generator=generator)
    assert_rows_alone(lambda x: OPERATIONS.rms_norm(x[:, 6:8], weight, 1e-5), heads)


@with_1_and_2_threads
@pytest.mark.parametrize("size", [96, 177, 1536, 4100])
def test_silu_and_mul(size: int) -> None:
    assert_rows_alone(OPERATIONS.silu_and_mul, torch.randn(300, 2 * size, generator=torch.Generator().manual_seed(0)) * 4)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
def test_rotate(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(300, 1, 1, head_dim // 2, generator=generator)
    heads = torch.randn(300, 5, head_dim, generator=generator)

    def rotated(x: Tensor) -> Tensor:
        cos_sin = x[:, 5:, :].unflatten(1, (1, 1))  # type: ignore[no-untyped-call]
        heads = x[:, :5].clone()
        OPERATIONS.rotate(heads, cos_sin[..., : head_dim // 2].cos(), cos_sin[..., : head_dim // 2].sin())
        return heads

    assert_rows_alone(rotated, torch.cat([heads, torch.cat([angles, angles], dim=-1)[:, 0]], dim=1))


# ---- attention ---------------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 31, 100, 128, 129, 257, 511, 512, 513, 640, 700, 1025)


class AttentionBed:
    """Sequences of all LENGTHS in one cache. Small keys make all weights nearly equal, so that the values, v and -v, cancel."""

    def __init__(self, num_kv_heads: int, num_heads: int, head_dim: int, block_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        layout = KVLayout(1, num_kv_heads, head_dim, block_size, "bf16")
        tables = [list(range(layout.num_blocks_for(length))) for length in LENGTHS]
        num_blocks = sum(map(len, tables))
        order = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[order.pop() for _ in table] for table in tables]
        self.cache = RowKVCache(layout, torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8))
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.cache.layer_keys(0).copy_(torch.randn(shape, generator=generator) * 0.02)
        half = torch.randn(num_blocks, num_kv_heads, block_size // 2, head_dim, generator=generator)
        self.cache.layer_values(0).copy_(torch.cat([half, -half], dim=2))
        self.queries = [torch.randn(length, num_heads, head_dim, generator=generator) for length in LENGTHS]
        self.num_heads = num_heads
        self.block_size = block_size

    def attend(self, parts: Sequence[tuple[int, int, int]], window: int | None) -> list[Tensor]:
        """Each part (sequence, position, num_tokens) as a span of one batch."""
        spans: list[BatchSpan] = []
        for sequence, position, num_tokens in parts:
            first_row = spans[-1].first_row + spans[-1].num_tokens if spans else 0
            num_blocks = -(-(position + num_tokens) // self.block_size)
            spans.append(BatchSpan(first_row, num_tokens, position, tuple(self.tables[sequence][:num_blocks]), is_prompt=True))
        num_rows = sum(number for _, _, number in parts)
        empty = torch.zeros(num_rows, dtype=torch.int64)
        attention = OPERATIONS.plan_attention(ForwardBatch(empty, empty, empty, empty, tuple(spans)), self.cache, self.num_heads, 0.2)
        queries = torch.cat([self.queries[sequence][position : position + number] for sequence, position, number in parts])
        return list(torch.split(attention(0, queries, window), [number for _, _, number in parts]))


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(("num_kv_heads", "num_heads", "head_dim"), [(3, 9, 64), (8, 8, 64), (1, 8, 128), (2, 14, 24)])
def test_attention(num_kv_heads: int, num_heads: int, head_dim: int, window: int | None) -> None:
    bed = AttentionBed(num_kv_heads, num_heads, head_dim, 16)
    whole = [bed.attend([(sequence, 0, length)], window)[0] for sequence, length in enumerate(LENGTHS)]
    for before_end in (1, 2, 30, 90):
        tokens = [(sequence, length - before_end, 1) for sequence, length in enumerate(LENGTHS) if length >= before_end]
        for (sequence, position, _), together in zip(tokens, bed.attend(tokens, window), strict=True):
            (alone,) = bed.attend([(sequence, position, 1)], window)
            assert torch.equal(alone, together), (LENGTHS[sequence], position)
            if OPERATIONS.shares_generated:
                assert torch.equal(alone, whole[sequence][position : position + 1]), (LENGTHS[sequence], position)
    for chunk in (33, 64, 177, 512):
        for start in range(0, max(LENGTHS), 3 * chunk):
            parts = [(i, start, min(chunk, length - start)) for i, length in enumerate(LENGTHS) if length > start]
            for (i, position, number), rows in zip(parts, bed.attend(parts, window), strict=True):
                assert torch.equal(rows, whole[i][position : position + number]), (chunk, LENGTHS[i], position)


@pytest.mark.parametrize("rows_per_token", range(1, 72))
def test_no_block_of_queries_has_a_single_row(rows_per_token: int) -> None:
    for num_tokens in (1, 2, 11, 16, 100, 512):
        padded = padded_queries(num_tokens, rows_per_token)
        assert padded >= num_tokens and padded * rows_per_token % 32 != 1


def test_last_tile_of_a_context_is_a_power_of_two() -> None:
    for num_tokens in range(1, 2100):
        padded = padded_context(num_tokens, 16)
        assert num_tokens <= padded < num_tokens + 512 and padded % 512 in (0, 128, 256)


# ---- the whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "scheme"), [*((family, "int8") for family in FAMILIES), ("llama", "bf16"), ("qwen3", "bf16")])
def test_logits_of_the_whole_model(family: str, scheme: str) -> None:
    drive = ModelDrive(tiny_model(family), engine_config(scheme))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (1, 2, 33, 70, 140)]
    alone = [drive.logits([drive.sequence(prompt)], [len(prompt)]) for prompt in prompts]
    together = drive.logits([drive.sequence(prompt) for prompt in prompts], [len(prompt) for prompt in prompts])
    assert together is not None
    for index, logits in enumerate(alone):
        assert logits is not None and torch.equal(logits, together[index : index + 1])
    for chunk in (1, 16, 23):
        sequences = [drive.sequence(prompts[3]), drive.sequence(prompts[2])]
        while sequences[0].num_uncomputed_tokens:
            live = [sequence for sequence in sequences if sequence.num_uncomputed_tokens]
            last = drive.logits(live, [min(chunk, sequence.num_uncomputed_tokens) for sequence in live])
        assert last is not None and torch.equal(last, together[3:4]), f"chunks of {chunk}"
