"""A whole step in one call: all layers over the native kernels, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.engine.interrupt import Interrupt, StepInterrupted
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.native.checks import check_contiguous, check_indexes, check_range, check_rows, check_vector
from cluster.engine.native.decode_tables import DecodeTables
from cluster.engine.native.kv_cache import NativeKVCache
from cluster.engine.native.kv_view import kv_view
from cluster.engine.native.linear import NativeLinear
from cluster.engine.rope import RotaryTable
from cluster.model_config import ModelConfig


class NativeDecoder:
    """See `model.Decoder`. It is bound to the first cache that it sees."""

    def __init__(self, native: ModuleType, layers: Sequence[LayerParts[NativeLinear]], config: ModelConfig, rotary: RotaryTable) -> None:
        """
        Raises:
            ValueError: a part of another shape than the config's; names it.
        """
        table = (rotary.cos.shape[0], config.head_dim // 2)
        check_contiguous("cos", rotary.cos, torch.float32, table)
        check_contiguous("sin", rotary.sin, torch.float32, table)
        for index, parts in enumerate(layers):
            _check_parts(f"layers.{index}", parts, config)
        self._native = native
        self._config = config
        self._parts = layers  # the kernels hold only addresses
        self._rotary = rotary
        self._cache: KVCache | None = None
        self._decoder: Any = None
        self._decode_tables = DecodeTables()

    def __call__(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache, interrupt: Interrupt) -> None:
        """See `model.Decoder`.

        Raises:
            StepInterrupted: see there.
            ValueError: rows, positions or blocks that are not there: C++ would write over other memory.
        """
        if cache is not self._cache:
            self._bind(cache)
        num_decodes = batch.num_output_tokens
        self._check_step(hidden, batch, cache)
        decodes = self._decode_tables
        decodes.fill(batch.spans[:num_decodes], cache.num_blocks)
        prompts, tables = self._prompts(batch.spans[num_decodes:])
        check_range("block_ids", torch.from_numpy(tables), 0, cache.num_blocks)
        is_done = self._decoder.run(
            hidden.data_ptr(), batch.num_tokens, batch.positions.data_ptr(), batch.slot_mapping.data_ptr(),
            num_decodes, decodes.tables_address, decodes.num_columns, decodes.context_lens_address, prompts, tables.ctypes.data,
            interrupt.address,
        )  # fmt: skip
        if not is_done:
            raise StepInterrupted

    def _check_step(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        num_tokens, block_size = batch.num_tokens, cache.layout.block_size
        check_contiguous("hidden", hidden, torch.float32, (num_tokens, self._config.hidden_size))
        check_indexes("positions", batch.positions, torch.int64, num_tokens, high=self._rotary.cos.shape[0])
        check_indexes("slot_mapping", batch.slot_mapping, torch.int64, num_tokens, high=cache.num_blocks * block_size)
        first_row = 0
        for span in batch.spans:
            if span.first_row != first_row or span.num_tokens < 1 or span.position < 0 or span.end > len(span.block_ids) * block_size:
                raise ValueError(f"spans: {span} does not follow row {first_row} or is beyond its blocks of {block_size} tokens")
            first_row += span.num_tokens
        if first_row != num_tokens:
            raise ValueError(f"spans: they have {first_row} rows, the batch {num_tokens}")

    def _bind(self, cache: KVCache) -> None:
        assert isinstance(cache, NativeKVCache)
        config, layout, rotary = self._config, cache.layout, self._rotary
        found = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
        expected = (config.num_layers, config.num_kv_heads, config.head_dim)
        if found != expected:
            raise ValueError(f"layout: {found} layers, KV heads and head_dim are not the model's {expected}")
        shape = self._native.DecoderShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.rms_norm_eps,
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
        )
        pool = kv_view(self._native, layout, cache.storage, 0)
        self._decoder = self._native.Decoder(shape, pool, layout.layer_stride, [self._layer(parts) for parts in self._parts])
        self._cache = cache

    def _layer(self, parts: LayerParts[NativeLinear]) -> Any:
        return self._native.Layer(
            parts.attention_norm.data_ptr(),
            parts.qkv.weight,
            0 if parts.q_norm is None else parts.q_norm.data_ptr(),
            0 if parts.k_norm is None else parts.k_norm.data_ptr(),
            self._native.MAX_WINDOW if parts.window is None else parts.window,
            parts.output.weight,
            parts.mlp_norm.data_ptr(),
            parts.gate_up.weight,
            parts.down.weight,
        )

    def _prompts(self, spans: Sequence[BatchSpan]) -> tuple[list[Any], np.ndarray]:
        prompts: list[Any] = []
        block_ids: list[int] = []
        for span in spans:
            prompts.append(self._native.PromptSpan(span.first_row, span.num_tokens, span.position, len(block_ids)))
            block_ids += span.block_ids
        return prompts, np.array(block_ids, dtype=np.int32)


class NativeHead:
    """See `model.Head`."""

    def __init__(self, native: ModuleType, norm: Tensor, lm_head: NativeLinear, config: ModelConfig) -> None:
        """
        Raises:
            ValueError: a part of another shape than the config's; names it.
        """
        check_vector("norm", norm, config.hidden_size)
        _check_linear("lm_head", lm_head, config.hidden_size, config.vocab_size)
        self._native = native
        self._norm = norm
        self._lm_head = lm_head
        self._eps = config.rms_norm_eps

    def __call__(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        check_rows("hidden", hidden, num_rows, self._lm_head.in_features)
        logits = torch.empty(num_rows, self._lm_head.out_features)
        source = self._native.Source(self._native.Prologue.RMS_NORM, hidden.data_ptr(), hidden.stride(0), self._norm.data_ptr(), self._eps)
        output = self._native.Output(logits.data_ptr(), self._lm_head.out_features, False)
        self._native.linear(self._lm_head.weight, source, num_rows, output)
        return logits


def _check_parts(name: str, parts: LayerParts[NativeLinear], config: ModelConfig) -> None:
    hidden_size, intermediate_size, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    check_vector(f"{name}.attention_norm", parts.attention_norm, hidden_size)
    check_vector(f"{name}.mlp_norm", parts.mlp_norm, hidden_size)
    for norm_name, norm in (("q_norm", parts.q_norm), ("k_norm", parts.k_norm)):
        if norm is not None:
            check_vector(f"{name}.{norm_name}", norm, head_dim)
    _check_linear(f"{name}.qkv", parts.qkv, hidden_size, (config.num_heads + 2 * config.num_kv_heads) * head_dim)
    _check_linear(f"{name}.output", parts.output, config.num_heads * head_dim, hidden_size)
    _check_linear(f"{name}.gate_up", parts.gate_up, hidden_size, 2 * intermediate_size)
    _check_linear(f"{name}.down", parts.down, intermediate_size, hidden_size)


def _check_linear(name: str, linear: NativeLinear, in_features: int, out_features: int) -> None:
    if (linear.in_features, linear.out_features) != (in_features, out_features):
        raise ValueError(f"{name}: {linear.in_features} → {linear.out_features} is not {in_features} → {out_features}")
