"""Small GGUF files with a real byte-level vocabulary, for the import's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "Ġ Ġ", "i n", "1 2", "12 3")


def tokens() -> list[str]:
    """Control tokens, the byte alphabet, and what the merges make."""
    made = [merge.replace(" ", "") for merge in MERGES]
    return [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *made, "<think>"]


def write_gguf(
    path: Path, arch: str = "llama", *, tensors: tuple[str, ...] = (), weights: bool = False, pre: str = "smollm", **keys: Any
) -> Path:
    """A file of `arch` with the metadata of a small model; `keys` (dots as __) replace or add, None leaves one out.

    Its tensors are stubs, but with `weights` they are those of a model that can be computed.
    """
    vocabulary = tokens()
    kinds = [3] * len(CONTROL) + [1] * (len(vocabulary) - len(CONTROL) - 1) + [4]
    values: dict[str, Any] = {
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.rope.freq_base": 1000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    values.update({key.replace("__", "."): value for key, value in keys.items()})
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        _add(writer, key, value)
    if weights:
        for name, shape in _shapes(len(vocabulary)).items():
            writer.add_tensor(name, np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    else:
        for name in ("token_embd.weight", "output_norm.weight", *tensors):
            writer.add_tensor(name, np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Of all tensors, for the sizes that `write_gguf` writes."""
    hidden, kv_size, inner = 64, 32, 96
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    layers = {f"blk.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    return {"token_embd.weight": (vocab_size, hidden), "output_norm.weight": (hidden,)} | layers


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
