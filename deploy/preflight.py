"""What can be known to fail before a process is started: the model against the config, and the config against the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cluster.config import BatonConfig, PoolConfig
from cluster.errors import ConfigError
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig, weight_files


def pools(config: BatonConfig) -> Iterator[tuple[str, PoolConfig]]:
    """The pools that `config` starts, with their keys."""
    if config.mode == "disaggregated":
        yield "prefill", config.prefill
    yield "decode", config.decode


def check_model(config: BatonConfig, folder: Path) -> None:
    """Raises:
    ConfigError: for `model`, `max_model_len` or a pool's `kv_cache_bytes`, when the model in `folder` cannot be served as configured.
    """
    model = ModelConfig.load(folder)
    weight_files(folder)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} is beyond the model's own limit of {model.max_position_embeddings}",
            param="max_model_len",
        )
    for name, pool in pools(config):
        layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, pool.block_size, pool.kv_dtype)
        if pool.kv_cache_bytes < layout.block_bytes:
            key = f"{name}.kv_cache_bytes"
            raise ConfigError(f"{key}: {pool.kv_cache_bytes:,} bytes do not hold one block of {layout.block_bytes:,}", param=key)


def check_memory(config: BatonConfig, memory_bytes: int | None = None) -> None:
    """Raises:
    ConfigError: for the larger pool's `kv_cache_bytes`, when the KV alone is more than this machine's memory; or for such a `swap_bytes`.
    """
    limit = memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = {name: pool.replicas * pool.kv_cache_bytes for name, pool in pools(config)}
    if sum(wanted.values()) > limit:
        key = f"{max(wanted, key=wanted.__getitem__)}.kv_cache_bytes"
        raise ConfigError(f"{key}: the KV pools need {sum(wanted.values()):,} bytes, this machine has {limit:,}", param=key)
    for name, pool in pools(config):
        if pool.swap_bytes > limit:  # one may be more than what is left: it costs nothing until it is used
            key = f"{name}.swap_bytes"
            raise ConfigError(f"{key}: {pool.swap_bytes:,} bytes, this machine has {limit:,}", param=key)
