"""What a gateway knows of the one model it serves."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import BatonConfig, EngineConfig
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Fixed for the life of a gateway."""

    name: str
    created: int  # Unix time
    max_model_len: int  # prompt + output tokens: the configured limit, or what the decode pool can hold
    vocab_size: int
    system_fingerprint: str  # names the numerics domain, or the pair of them, that computes the answers (promise P1)
    default_max_tokens: int | None = None  # None: up to the context

    @staticmethod
    def of(config: BatonConfig, model: ModelConfig, *, name: str, created: int) -> ModelCard:
        """The card of a configured application."""
        limit = model.max_position_embeddings
        return ModelCard(
            name=name,
            created=created,
            max_model_len=min(limit, config.max_model_len or limit, _num_tokens_held(config.decode, model)),
            vocab_size=model.vocab_size,
            system_fingerprint=_system_fingerprint(config),
            default_max_tokens=config.gateway.default_max_tokens,
        )


def _num_tokens_held(pool: EngineConfig, model: ModelConfig) -> int:
    """Tokens that fill a pool's KV; a sequence beyond it could never end."""
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, pool.block_size, pool.kv_dtype)
    return pool.kv_cache_bytes // layout.block_bytes * pool.block_size


def _system_fingerprint(config: BatonConfig) -> str:
    decode = _domain(config.decode)
    if config.mode == "colocated":
        return f"baton-{decode}"
    prefill = _domain(config.prefill)
    return f"baton-{prefill}" if prefill == decode else f"baton-{prefill}-to-{decode}"


def _domain(engine: EngineConfig) -> str:
    return f"{engine.scheme}-kv_{engine.kv_dtype}-{engine.kernels}"
