"""A whole step in one call: all layers over the native kernels, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.engine.forward_batch import BatchSpan, ForwardBatch
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.native.activations import check_rows, check_vector
from cluster.engine.native.attention import kv_view
from cluster.engine.native.decode_tables import DecodeTables
from cluster.engine.native.kv_cache import NativeKVCache
from cluster.engine.native.linear import NativeLinear
from cluster.engine.rope import RotaryTable
from cluster.model_config import ModelConfig


class NativeDecoder:
    """See `model.Decoder`. It is bound to the first cache that it sees."""

    def __init__(self, native: ModuleType, layers: Sequence[LayerParts[NativeLinear]], config: ModelConfig, rotary: RotaryTable) -> None:
        self._native = native
        self._config = config
        self._parts = layers  # the kernels hold only addresses
        self._rotary = rotary
        self._cache: KVCache | None = None
        self._decoder: Any = None
        self._decode_tables = DecodeTables()

    def __call__(self, hidden: Tensor, batch: ForwardBatch, cache: KVCache) -> None:
        if cache is not self._cache:
            self._bind(cache)
        check_rows("hidden", hidden, batch.num_tokens, self._config.hidden_size)
        num_decodes = batch.num_output_tokens
        decodes = self._decode_tables
        decodes.fill(batch.spans[:num_decodes])
        prompts, tables = self._prompts(batch.spans[num_decodes:])
        self._decoder.run(
            hidden.data_ptr(), batch.num_tokens, batch.positions.data_ptr(), batch.slot_mapping.data_ptr(),
            num_decodes, decodes.tables_address, decodes.num_columns, decodes.context_lens_address, prompts, tables.ctypes.data,
        )  # fmt: skip

    def _bind(self, cache: KVCache) -> None:
        assert isinstance(cache, NativeKVCache)
        config, layout, rotary = self._config, cache.layout, self._rotary
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
        config = self._config
        check_vector("attention_norm", parts.attention_norm, config.hidden_size)
        check_vector("mlp_norm", parts.mlp_norm, config.hidden_size)
        for norm in (parts.q_norm, parts.k_norm):
            if norm is not None:
                check_vector("q_norm, k_norm", norm, config.head_dim)
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

    def __init__(self, native: ModuleType, norm: Tensor, lm_head: NativeLinear, eps: float) -> None:
        check_vector("norm", norm, lm_head.in_features)
        self._native = native
        self._norm = norm
        self._lm_head = lm_head
        self._eps = eps

    def __call__(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        check_rows("hidden", hidden, num_rows, self._lm_head.in_features)
        logits = torch.empty(num_rows, self._lm_head.out_features)
        source = self._native.Source(self._native.Prologue.RMS_NORM, hidden.data_ptr(), hidden.stride(0), self._norm.data_ptr(), self._eps)
        output = self._native.Output(logits.data_ptr(), self._lm_head.out_features, False)
        self._native.linear(self._lm_head.weight, source, num_rows, output)
        return logits
