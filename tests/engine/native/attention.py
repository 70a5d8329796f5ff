"""The kernels of attention and KV writes one by one, on blocks in the packing "vnni" (`kv_packing`); the engine runs them from C++.

The bits of a row (one query head of one token) depend on its query, its position and the KV it sees alone (P0): not on the batch, on
chunks, on the block size or on threads. They differ between instruction sets and between `decode` and `prefill` they may.
KV must be finite where it is in use; unused parts of blocks may hold anything.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from cluster.engine.native.checks import check_contiguous, check_indexes
from cluster.engine.native.kv_view import kv_view
from cluster.engine.native.limits import MAX_HEADS_PER_KV_HEAD
from cluster.kv_layout import KVLayout


class NativeAttention:
    """The kernels over one KV pool."""

    def __init__(self, native: ModuleType, layout: KVLayout, storage: Tensor) -> None:
        """
        Args:
            native: the compiled module.
            layout: of a block.
            storage: uint8 `[num_blocks, block_bytes]`; blocks may lie further apart than they are long.

        Raises:
            ValueError: a layout, dtype, shape or alignment that the kernels do not know; names it.
        """
        self._native = native
        self._layout = layout
        self._storage = storage  # the views below hold only its address
        self._views = [kv_view(native, layout, storage, layer) for layer in range(layout.num_layers)]

    def write(
        self,
        layer: int,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        positions: Tensor,
        slots: Tensor,
        norms: tuple[Tensor, Tensor, float] | None = None,
    ) -> Tensor:
        """Norms and rotates a step's q and k, and stores k and v.

        Args:
            layer: where to store.
            qkv: float32 `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`; tokens may lie apart.
            rotary: cosines and sines, float32 `[num_positions, head_dim / 2]` each.
            positions: int64 `[num_tokens]`, rows of `rotary`.
            slots: int64 `[num_tokens]`: block_id * block_size + offset, each at most once.
            norms: weights of the RMS norms of q and k, float32 `[head_dim]` each, and their epsilon.

        Returns:
            q, float32 `[num_tokens, num_heads, head_dim]`.

        Raises:
            ValueError: an argument with a wrong dtype, shape or value; names it.
        """
        layout = self._layout
        _check_rows("qkv", qkv, layout.head_dim)
        num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * layout.num_kv_heads
        self._check_num_heads("qkv", num_heads)
        for name, table in zip(("cos", "sin"), rotary, strict=True):
            check_contiguous(name, table, torch.float32, (rotary[0].shape[0], layout.head_dim // 2))
        for name, weight in zip(("query_norm", "key_norm"), norms[:2] if norms else (), strict=False):
            check_contiguous(name, weight, torch.float32, (layout.head_dim,))
        check_indexes("positions", positions, torch.int64, num_tokens, low=0, high=rotary[0].shape[0])
        check_indexes("slots", slots, torch.int64, num_tokens, low=0, high=self._storage.shape[0] * layout.block_size)
        queries = torch.empty(num_tokens, num_heads, layout.head_dim)
        query_norm, key_norm, eps = (norms[0].data_ptr(), norms[1].data_ptr(), norms[2]) if norms else (0, 0, 0.0)
        self._native.write_kv(
            self._views[layer], query_norm, key_norm, eps, qkv.data_ptr(), qkv.stride(0), num_tokens, num_heads, rotary[0].data_ptr(),
            rotary[1].data_ptr(), positions.data_ptr(), slots.data_ptr(), queries.data_ptr(), queries.stride(0),
        )  # fmt: skip
        return queries

    def decode(
        self, layer: int, queries: Tensor, block_tables: Tensor, context_lens: Tensor, *, scale: float, window: int | None = None
    ) -> Tensor:
        """Attention of one token a sequence, whose K and V are stored.

        Args:
            layer: whose K and V to read.
            queries: float32 `[num_seqs, num_heads, head_dim]`, rotated; sequences may lie apart.
            block_tables: int32 `[num_seqs, max_blocks]`; what is behind a context or before its window may be anything.
            context_lens: int32 `[num_seqs]`: stored tokens, the query's own included.
            scale: of the scores.
            window: a query sees itself and the `window - 1` tokens before it; None: all before it.

        Returns:
            float32 `[num_seqs, num_heads, head_dim]`.

        Raises:
            ValueError: an argument with a wrong dtype, shape or value; names it.
        """
        num_seqs, num_heads = self._check_queries(queries)
        limit = self._check_window(window)
        if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or len(block_tables) != num_seqs or block_tables.stride(1) != 1:
            raise ValueError(f"block_tables: {block_tables.dtype} {list(block_tables.shape)} is not int32 [{num_seqs}, max_blocks]")
        capacity = block_tables.shape[1] * self._layout.block_size
        check_indexes("context_lens", context_lens, torch.int32, num_seqs, low=1, high=capacity + 1)
        columns = torch.arange(block_tables.shape[1])
        lens = context_lens.long()[:, None]
        first = (lens - limit).clamp_min(0) // self._layout.block_size
        self._check_blocks(block_tables[(columns >= first) & (columns * self._layout.block_size < lens)])
        out = torch.empty(num_seqs, num_heads, self._layout.head_dim)
        self._native.decode_attention(
            self._views[layer], num_heads, scale, limit, queries.data_ptr(), queries.stride(0), block_tables.data_ptr(),
            block_tables.stride(0), context_lens.data_ptr(), num_seqs, out.data_ptr(),
        )  # fmt: skip
        return out

    def prefill(
        self, layer: int, queries: Tensor, first_position: int, block_table: Tensor, *, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of neighbouring tokens of one sequence, stored as all tokens before them.

        Args:
            layer: whose K and V to read.
            queries: float32 `[num_tokens, num_heads, head_dim]`, rotated; tokens may lie apart.
            first_position: of the first query.
            block_table: int32 `[num_blocks]`; what is behind the last query or before its first window may be anything.
            scale: of the scores.
            window: a query sees itself and the `window - 1` tokens before it; None: all before it.

        Returns:
            float32 `[num_tokens, num_heads, head_dim]`.

        Raises:
            ValueError: an argument with a wrong dtype, shape or value; names it.
        """
        num_tokens, num_heads = self._check_queries(queries)
        limit = self._check_window(window)
        end = first_position + num_tokens
        if block_table.dtype != torch.int32 or block_table.dim() != 1 or not block_table.is_contiguous():
            raise ValueError(f"block_table: {block_table.dtype} {list(block_table.shape)} is not int32 [num_blocks]")
        if first_position < 0 or end > len(block_table) * self._layout.block_size:
            raise ValueError(f"first_position: {first_position} and {num_tokens} queries do not fit a table of {len(block_table)} blocks")
        first = max(0, first_position + 1 - limit) // self._layout.block_size
        self._check_blocks(block_table[first : self._layout.num_blocks_for(end)])
        out = torch.empty(num_tokens, num_heads, self._layout.head_dim)
        self._native.prefill_attention(
            self._views[layer], num_heads, scale, limit, queries.data_ptr(), queries.stride(0), num_tokens, first_position,
            block_table.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def _check_queries(self, queries: Tensor) -> tuple[int, int]:
        _check_rows("queries", queries, self._layout.head_dim)
        self._check_num_heads("queries", queries.shape[1])
        return queries.shape[0], queries.shape[1]

    def _check_num_heads(self, name: str, num_heads: int) -> None:
        num_kv_heads = self._layout.num_kv_heads
        if num_heads <= 0 or num_heads % num_kv_heads or num_heads > MAX_HEADS_PER_KV_HEAD * num_kv_heads:
            raise ValueError(f"{name}: {num_heads} query heads are not 1 to {MAX_HEADS_PER_KV_HEAD} for each of {num_kv_heads} KV heads")

    def _check_blocks(self, block_ids: Tensor) -> None:
        if block_ids.numel() and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < self._storage.shape[0]:
            raise ValueError(f"block_tables: a block is not in 0…{self._storage.shape[0] - 1}")

    def _check_window(self, window: int | None) -> int:
        limit = int(self._native.MAX_WINDOW)
        if window is not None and not 1 <= window <= limit:
            raise ValueError(f"window: {window} is not 1…{limit}")
        return limit if window is None else window


def _check_rows(name: str, x: Tensor, head_dim: int) -> None:
    """Heads of a token must be neighbours."""
    fits = x.dtype == torch.float32 and x.dim() == 3 and x.shape[0] > 0 and x.shape[2] == head_dim
    if not fits or x.stride(2) != 1 or x.stride(1) != head_dim:
        raise ValueError(f"{name}: {x.dtype} {list(x.shape)} is not float32 [tokens, heads, {head_dim}] with a token's heads in a row")
