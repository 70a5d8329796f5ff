"""The native kernel set: Baton's own C++ for x86 CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Final

from torch import Tensor

from cluster.engine.kernels import KernelSet
from cluster.engine.kv_cache import KVCache
from cluster.engine.layer_parts import LayerParts
from cluster.engine.model import Decoder, Head
from cluster.engine.native import limits
from cluster.engine.native.decoder import NativeDecoder, NativeHead
from cluster.engine.native.kv_cache import NativeKVCache
from cluster.engine.native.kv_packing import PACKING
from cluster.engine.native.linear import Bf16Linear, NativeLinear, W4A8Linear, W8A8Linear, W8G32Linear
from cluster.engine.rope import RotaryTable
from cluster.engine.weights import FusedWeight
from cluster.errors import ConfigError
from cluster.kv_layout import KVLayout
from cluster.model_config import ModelConfig

_Make = Callable[[FusedWeight, Tensor | None], NativeLinear]


class NativeKernels(KernelSet[NativeLinear]):
    """See `KernelSet`."""

    packing = PACKING

    def __init__(self, native: ModuleType, num_threads: int) -> None:
        self._native = native
        native.set_num_threads(num_threads)

    @property
    def name(self) -> str:
        return f"native-{self._native.isa()}"

    @property
    def shares_generated(self) -> bool:
        """Prompts go through AMX tiles, which sum in another order than the vectors of decode."""
        return str(self._native.isa()) != "amx"

    def make_linear(self, scheme: str, weight: FusedWeight, bias: Tensor | None) -> NativeLinear:
        return _maker(_LINEARS, scheme)(weight, None if bias is None else bias.float())

    def make_lm_head(self, scheme: str, weight: FusedWeight) -> NativeLinear:
        return _maker(_LM_HEADS, scheme)(weight, None)

    def make_decoder(self, layers: Iterable[LayerParts[NativeLinear]], config: ModelConfig, rotary: RotaryTable) -> Decoder:
        return NativeDecoder(self._native, list(layers), config, rotary)

    def make_head(self, norm: Tensor, lm_head: NativeLinear, config: ModelConfig) -> Head:
        return NativeHead(self._native, norm, lm_head, config)

    def make_cache(self, layout: KVLayout, storage: Tensor) -> KVCache:
        return NativeKVCache(layout, storage)


def why_unfit(config: ModelConfig, block_size: int) -> str | None:
    """What of a model or its blocks the native kernels cannot compute; None when they can."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size % limits.GROUP_SIZE:
            return f"{name} is {size}, no multiple of {limits.GROUP_SIZE}"
    if (reason := limits.why_unfit_head_dim(config.head_dim)) is not None:
        return f"head_dim: {reason}"
    if config.num_heads > limits.MAX_HEADS_PER_KV_HEAD * config.num_kv_heads:
        return f"{config.num_heads} heads share {config.num_kv_heads} KV heads, more than {limits.MAX_HEADS_PER_KV_HEAD} each"
    if (reason := limits.why_unfit_block_size(block_size)) is not None:
        return f"block_size: {reason}"
    return None


def _bf16(weight: FusedWeight, bias: Tensor | None) -> NativeLinear:
    return Bf16Linear.from_float(weight.floats(), bias)


def _int8(weight: FusedWeight, bias: Tensor | None) -> NativeLinear:
    return W8A8Linear.from_float(weight.floats(), bias)


def _int4(weight: FusedWeight, bias: Tensor | None) -> NativeLinear:
    """4-bit blocks of the file stay what they are: to expand and quantize them again would lose what they hold."""
    blocks = weight.blocks()
    if blocks is not None and blocks.kind in ("Q4_0", "Q4_1"):
        return W4A8Linear.from_gguf(blocks.data, blocks.kind, bias)
    if blocks is not None and blocks.kind == "Q8_0":
        return W8G32Linear.from_gguf(blocks.data, bias)
    return W4A8Linear.from_float(weight.floats(), bias)


def _int8_groups(weight: FusedWeight, bias: Tensor | None) -> NativeLinear:
    blocks = weight.blocks()
    if blocks is not None and blocks.kind == "Q8_0":
        return W8G32Linear.from_gguf(blocks.data, bias)
    return W8G32Linear.from_float(weight.floats(), bias)


_LINEARS: Final[Mapping[str, _Make]] = {"bf16": _bf16, "int8": _int8, "int4": _int4}
# 4 bits there, or one scale for a whole row of activations, cost more quality than they save time.
_LM_HEADS: Final[Mapping[str, _Make]] = {**_LINEARS, "int8": _int8_groups, "int4": _int8_groups}


def _maker(makers: Mapping[str, _Make], scheme: str) -> _Make:
    if scheme not in makers:
        raise ConfigError(f"scheme: {scheme} has no native kernels; they have {', '.join(makers)}", param="scheme")
    return makers[scheme]
