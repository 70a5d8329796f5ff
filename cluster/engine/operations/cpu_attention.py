"""Paged attention on torch's fused CPU kernel: contexts are gathered by block table, equal shapes are computed together.

The kernel walks the keys in tiles of 512 from position 0 with an online softmax in float32, and the queries in blocks of 32 rows or
a multiple of that. Query heads that share a KV head are rows of one matrix. For row invariance (P0):

    context   its last tile is filled up to 128, 256 or 512 keys, and what lies behind the query is masked, so that it adds exact
              zeros. (Tiles of 320 or 384 keys sum in another order.)
    queries   the number of rows never leaves a remainder of one in a block of 32: a single row would go to a matrix-vector kernel
    padding   of queries repeats the last one; its result is dropped

Chunks are cut into pieces of one padded context each, which changes no bits and skips most of the keys that causality hides.

`tests/engine/test_row_invariance.py` proves on the machine at hand that these shapes suffice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.engine.row_kv_cache import RowKVCache

_KERNEL: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_KEYS_PER_TILE: Final = 512
_MIN_KEYS: Final = 128
_ROWS_PER_BLOCK: Final = 32
_CHUNK_MULTIPLE: Final = 16  # chunks are padded to it, so that short prompts of similar lengths share a group


def padded_context(num_tokens: int, block_size: int) -> int:
    """Tokens to gather for a context of `num_tokens`: full tiles and one of 128, 256 or 512."""
    full_tiles, rest = divmod(num_tokens - 1, _KEYS_PER_TILE)
    return int(full_tiles * _KEYS_PER_TILE + max(_MIN_KEYS, block_size, 1 << rest.bit_length()))


def padded_queries(num_tokens: int, rows_per_token: int) -> int:
    """Tokens to compute for `num_tokens` scheduled ones."""
    if num_tokens > 1:
        num_tokens = -(-num_tokens // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE
    while num_tokens * rows_per_token % _ROWS_PER_BLOCK == 1:
        num_tokens += 1
    return num_tokens


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equal padded shapes: one kernel call a layer."""

    num_seqs: int
    num_queries: int  # padded, each sequence
    num_keys: int  # padded, each sequence
    rows: Tensor  # [num_seqs * num_queries]: where in the batch each query is
    positions: Tensor  # [num_seqs, num_queries]
    read_index: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window; made when first asked for

    def mask(self, window: int | None, rows_per_token: int, dtype: torch.dtype) -> Tensor:
        """`[num_seqs, 1, num_queries * rows_per_token, num_keys]`: 0 where a query sees a key, else -inf."""
        if window not in self.masks:
            keys = torch.arange(self.num_keys)
            last = self.positions[:, :, None]
            is_hidden = keys > last if window is None else (keys > last) | (keys <= last - window)
            mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
            repeated = mask[:, :, None].expand(-1, -1, rows_per_token, -1)
            self.masks[window] = repeated.reshape(self.num_seqs, 1, self.num_queries * rows_per_token, self.num_keys)
        return self.masks[window]


class CpuAttention:
    """See `operations.base.Attention`."""

    def __init__(self, batch: ForwardBatch, cache: RowKVCache, num_heads: int, scale: float) -> None:
        self._cache = cache
        self._scale = scale
        self._num_heads = num_heads
        self._rows_per_token = num_heads // cache.layout.num_kv_heads
        self._groups = _groups(batch.spans, cache, self._rows_per_token)
        rows = torch.cat([group.rows for group in self._groups])
        self._is_identity = len(self._groups) == 1 and torch.equal(rows, torch.arange(batch.num_tokens))
        # Of the copies of a padded query any will do: all have the same bits.
        self._output_index = torch.empty(batch.num_tokens, dtype=torch.int64)
        self._output_index[rows] = torch.arange(rows.shape[0])

    def __call__(self, layer: int, queries: Tensor, window: int | None) -> Tensor:
        queries = queries.to(self._cache.dtype)
        if self._is_identity:
            return self._attend(self._groups[0], layer, queries, window).float()
        results = [self._attend(group, layer, queries.index_select(0, group.rows), window) for group in self._groups]
        return torch.cat(results).index_select(0, self._output_index).float()

    def _attend(self, group: _Group, layer: int, queries: Tensor, window: int | None) -> Tensor:
        """`queries` is `[num_seqs * num_queries, num_heads, head_dim]`, the result has its heads flat."""
        layout = self._cache.layout
        context = self._cache.read(layer, group.read_index, group.num_seqs)
        split = queries.view(group.num_seqs, group.num_queries, layout.num_kv_heads, self._rows_per_token, layout.head_dim)
        rows = split.transpose(1, 2).flatten(2, 3)
        mask = group.mask(window, self._rows_per_token, self._cache.dtype).expand(-1, layout.num_kv_heads, -1, -1)
        attended: Tensor = _KERNEL(rows, context[0], context[1], 0.0, False, attn_mask=mask, scale=self._scale)[0]
        merged = torch.unflatten(attended, 2, (group.num_queries, self._rows_per_token)).transpose(1, 2)
        return merged.reshape(group.num_seqs * group.num_queries, self._num_heads * layout.head_dim)


def _groups(spans: Sequence[BatchSpan], cache: RowKVCache, rows_per_token: int) -> list[_Group]:
    by_shape: dict[tuple[int, int], list[BatchSpan]] = defaultdict(list)
    for span in spans:
        for piece in _pieces(span, cache.layout.block_size):
            num_queries = padded_queries(piece.num_tokens, rows_per_token)
            by_shape[num_queries, padded_context(piece.end, cache.layout.block_size)].append(piece)
    return [_group(members, num_queries, num_keys, cache) for (num_queries, num_keys), members in by_shape.items()]


def _pieces(span: BatchSpan, block_size: int) -> Iterator[BatchSpan]:
    """Cuts a chunk where its padded context grows: the early queries of a prompt skip keys that they could not see."""
    start = span.position
    while start < span.end:
        end = min(span.end, padded_context(start + 1, block_size))
        block_ids = span.block_ids[: -(-end // block_size)]
        yield replace(span, first_row=span.first_row + start - span.position, num_tokens=end - start, position=start, block_ids=block_ids)
        start = end


def _group(spans: list[BatchSpan], num_queries: int, num_keys: int, cache: RowKVCache) -> _Group:
    offsets = torch.arange(num_queries)
    lengths = torch.tensor([[span.num_tokens] for span in spans])
    within = torch.minimum(offsets, lengths - 1)
    num_blocks = num_keys // cache.layout.block_size
    # Blocks behind the context's end are masked; the first one is at hand already.
    tables = torch.tensor([span.block_ids + span.block_ids[:1] * (num_blocks - len(span.block_ids)) for span in spans])
    return _Group(
        num_seqs=len(spans),
        num_queries=num_queries,
        num_keys=num_keys,
        rows=(torch.tensor([[span.first_row] for span in spans]) + within).view(-1),
        positions=torch.tensor([[span.position] for span in spans]) + within,
        read_index=cache.read_index(tables),
    )
