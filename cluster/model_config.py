"""What a checkpoint's folder says about the model, read once from `config.json` in the Hugging Face format.

The engine builds its decoder from it, the KV layout takes its shape from it, and the gateway takes the context and the vocabulary.
A model that Baton would compute wrongly is refused here, by the name of the field: an unknown architecture, a RoPE variant without
an implementation, an activation other than SwiGLU's, weights that are already quantized in a format without a loader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes without saying so in its config."""

    default_qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias_on_output: bool = False  # `attention_bias` means o_proj too


_FAMILIES: Final[Mapping[str, _Family]] = {
    "LlamaForCausalLM": _Family(attention_bias_on_output=True),
    "MistralForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(default_qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, attention_bias_on_output=True),
}
_ROPE_KINDS: Final = ("default", "linear", "llama3")
# Of `cluster.engine.smoothing`. Its suffix is not that of weights, which whole folders are searched for.
SMOOTHING_FILE: Final = "smoothing.st"
_WEIGHT_SUFFIXES: Final = (".safetensors", ".gguf")
_MIB: Final = 2**20
_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `linear` divides all frequencies by `factor`; `llama3` only the low ones, smoothed in between."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model: RMSNorm before attention and SwiGLU, RoPE, grouped query heads."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one a layer; a query sees itself and the window - 1 tokens before it
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def load(folder: Path) -> ModelConfig:
        """Reads `config.json`, and `generation_config.json` where there is one.

        Raises:
            ConfigError: a file is missing or not JSON, the architecture is unknown, or a field has a value without an implementation.
        """
        raw = _read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        return _parse(raw, generation)


def checkpoint_fingerprint(folder: Path) -> str:
    """32 hex digits that differ when the model does: over `config.json` and, of every weight file in order of name, the name, the size,
    the first MiB (its table of tensors) and 256 pieces of 64 KiB spread evenly over the rest, so that no tensor of any size goes unseen.
    Reading all of a large model would cost minutes at every start. The smoothing factors count where the folder has them.

    Raises:
        ConfigError: the folder has no `config.json` or no weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    paths = [folder / "config.json", *weight_files(folder)]
    if (folder / SMOOTHING_FILE).exists():
        paths.append(folder / SMOOTHING_FILE)
    for path in paths:
        try:
            parts = [path.name.encode(), *_sampled(path)]
        except OSError as error:
            raise ConfigError(f"model: cannot read {path.name}: {error.strerror}", param="model") from error
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sampled(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        yield file.read(_MIB)
        for index in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * (index + 1) // _NUM_SAMPLES)
            yield file.read(_SAMPLE_BYTES)


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files in order of name: all safetensors, or else its one GGUF file.

    Raises:
        ConfigError: there are none, or several GGUF files.
    """
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    if not found:
        raise ConfigError(f"model: no weights ({' or '.join(_WEIGHT_SUFFIXES)}) in {folder}", param="model")
    if found[0].suffix == ".gguf" and len(found) > 1:
        raise ConfigError(f"model: {len(found)} GGUF files in {folder}, expected one", param="model")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"model: cannot read {path}: {error.strerror}", param="model") from error
    except ValueError as error:
        raise ConfigError(f"model: {path} is not JSON: {error}", param="model") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"model: {path} is not a JSON object", param="model")
    return raw


def _parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    architecture, family = _family(raw)
    _refuse_unsupported(raw)
    num_heads = _positive(raw, "num_attention_heads")
    hidden_size = _positive(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", family.default_qkv_bias))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        max_position_embeddings=_positive(raw, "max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        qkv_bias=attention_bias,
        output_bias=attention_bias and family.attention_bias_on_output,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        sliding_windows=_sliding_windows(raw, architecture),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(raw, generation),
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise _bad("num_key_value_heads", "must divide num_attention_heads, and head_dim must be even")
    return config


def _family(raw: dict[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or ["(none)"]
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    raise _bad("architectures", f"{', '.join(map(str, names))} is not supported; known are {', '.join(_FAMILIES)}")


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise _bad("hidden_act", f"{activation} is not supported; known is silu")
    if "quantization_config" in raw:
        method = (raw["quantization_config"] or {}).get("quant_method", "unnamed")
        raise _bad("quantization_config", f"weights quantized as {method} are not supported; Baton quantizes by its own `scheme`")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` + `rope_scaling` of older checkpoints."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise _bad("rope_scaling", f"type {kind} is not supported; known are {', '.join(_ROPE_KINDS)}")
    if float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise _bad("partial_rotary_factor", "must be 1")
    original = scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position_embeddings=int(original),
    )


def _sliding_windows(raw: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    num_layers = int(raw["num_hidden_layers"])
    window: int | None = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    first = raw.get("max_window_layers", 28)
    kinds = raw.get("layer_types") or ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """All ids that either file names: chat models end a turn by one and a text by another."""
    found: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        found.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(found))


def _positive(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(key, f"must be a positive integer, is {value!r}")
    return value


def _bad(key: str, message: str) -> ConfigError:
    return ConfigError(f"model: config.json: {key}: {message}", param="model")
