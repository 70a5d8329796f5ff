"""Tiny random models, one of each family, written as real checkpoints: safetensors, tokenizer, chat template.

`tiny_model(family)` makes a folder once a process and gives the same folder after that; `oracle(family)` is the model by `transformers`.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE: Final = 512
EOS_TOKEN: Final = "<|im_end|>"
BOS_TOKEN: Final = "<|im_start|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS: Final = (
    "The quick brown fox jumps over the lazy dog while the river runs down to the sea.",
    "A worker takes the blocks of another worker and answers the request that was waiting in the queue.",
    "What is the capital of France? The capital of France is Paris, and the capital of Italy is Rome.",
    "user assistant system message content hello world one two three four five six seven eight nine ten",
    "Grüße aus Köln, naïve café, 東京 and emoji 🙂 make bytes that are no single token.",
)
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}


def _configs() -> dict[str, transformers.PreTrainedConfig]:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    return {
        "llama": transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
        "llama3-rope": transformers.LlamaConfig(**_SIZES, rope_parameters=llama3),
        "llama-bias": transformers.LlamaConfig(**_SIZES, rope_parameters=linear, attention_bias=True, mlp_bias=True),
        "mistral": transformers.MistralConfig(**_SIZES, head_dim=32, sliding_window=37),
        "qwen2": transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen2-window": transformers.Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=29, max_window_layers=1),
        "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=32),
    }


FAMILIES: Final = ("llama", "llama3-rope", "llama-bias", "mistral", "qwen2", "qwen2-window", "qwen3")


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="baton-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def tiny_model(family: str = "llama") -> Path:
    """Folder of the tiny model of `family` (one of FAMILIES), with `config.json`, safetensors in float32, and a tokenizer."""
    return _made(family)


@functools.cache
def _made(family: str) -> Path:
    folder = _root() / family
    folder.mkdir()
    write_tokenizer(folder)
    _write_model(folder, _configs()[family])
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of VOCAB_SIZE tokens with a chat template, in `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", BOS_TOKEN, EOS_TOKEN)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # The corpus is too small for all merges; ids up to VOCAB_SIZE must decode to something.
    tokenizer.add_tokens([f" filler{index}" for index in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _SIZES["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _write_model(folder: Path, config: transformers.PreTrainedConfig) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config.bos_token_id = tokenizer.token_to_id(BOS_TOKEN)
    config.eos_token_id = tokenizer.token_to_id(EOS_TOKEN)
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            # Norms start as ones and biases as zeros: a model that ignored them would pass.
            if name.endswith("bias") or "norm" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


@functools.cache
def oracle(family: str = "llama") -> Any:
    """The same model as `transformers` computes it (float32, eager attention)."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32, attn_implementation="eager")
    return model.eval()
