"""From a pool's config and a model's folder to an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.huge_pages import huge_page_zeros
from cluster.engine.kernels import KernelSet
from cluster.engine.kv_cache import KVCache
from cluster.engine.model_build import BuiltModel, build_model
from cluster.engine.runner import ModelRunner
from cluster.engine.scheduler import SchedulerLimits
from cluster.engine.sequence_factory import EngineIdentity
from cluster.errors import ConfigError
from cluster.host_memory import available_bytes

_LOG = logging.getLogger(__name__)
Allocate = Callable[[int], torch.Tensor]


def allocate_private(num_bytes: int) -> torch.Tensor:
    """Zeroed, resident memory of this process alone: uint8 `[num_bytes]`.

    Raises:
        ConfigError: the machine has no such memory left.
    """
    if num_bytes > available_bytes():
        raise ConfigError(f"cannot allocate {num_bytes} bytes, {available_bytes()} are available", param="kv_cache_bytes")
    try:
        return huge_page_zeros(num_bytes).zero_()  # pages are only there once they are written
    except OSError as error:
        raise ConfigError(f"cannot allocate {num_bytes} bytes: {error.strerror}", param="kv_cache_bytes") from error


def build_engine(
    config: EngineConfig,
    model_folder: Path,
    *,
    max_model_len: int | None = None,
    allocate: Allocate = allocate_private,
    kernels: KernelSet[Any] | None = None,
) -> Engine:
    """Loads the weights, then takes the KV pool from what memory is left. Seconds for small models, minutes for large ones.

    Args:
        config: of the pool.
        model_folder: `config.json`, weights.
        max_model_len: prompt and output tokens of a sequence; None is the model's own limit.
        allocate: memory for the KV pool, zeroed uint8 `[num_bytes]`; it may be memory that other processes map.
        kernels: instead of those that the config names.

    Raises:
        ConfigError: something of the folder or the config cannot be served; names it.
    """
    built = build_model(config, model_folder, max_model_len, kernels)
    kv_cache = _kv_cache(config, built, allocate)
    limits = SchedulerLimits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_reserved_blocks=int(kv_cache.num_blocks * config.reserve_fraction),
    )
    num_swap_slots = config.swap_bytes // built.layout.block_bytes
    _LOG.info("%s: %d KV blocks of %d bytes, %d swap slots", built.domain, kv_cache.num_blocks, built.layout.block_bytes, num_swap_slots)
    runner = ModelRunner(built.model, kv_cache)
    return Engine(_identity(config, built), limits, built.layout, kv_cache, runner, num_swap_slots=num_swap_slots)


def _identity(config: EngineConfig, built: BuiltModel) -> EngineIdentity:
    return EngineIdentity(
        checkpoint=built.checkpoint,
        domain=built.domain,
        vocab_size=built.model.config.vocab_size,
        eos_token_ids=frozenset(built.model.config.eos_token_ids),
        max_model_len=built.max_model_len,
        prefix_caching=config.prefix_caching,
        shares_generated=built.kernels.shares_generated,
    )


def _kv_cache(config: EngineConfig, built: BuiltModel, allocate: Allocate) -> KVCache:
    layout = built.layout
    num_blocks = config.kv_cache_bytes // layout.block_bytes
    if num_blocks == 0:
        raise ConfigError(f"kv_cache_bytes: {config.kv_cache_bytes} bytes hold no block of {layout.block_bytes}", param="kv_cache_bytes")
    try:
        storage = allocate(num_blocks * layout.block_bytes)
    except ConfigError as error:
        raise ConfigError(f"kv_cache_bytes: {error.message}, beside the weights", param="kv_cache_bytes") from error
    return built.make_cache(storage.view(num_blocks, layout.block_bytes))
