"""Tokenizers made in code: byte-level BPE, and pieces with byte fallback as Llama 2, Mistral and Gemma have them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "The capital of France is Paris. What is the capital of Italy? It is Rome.",
    "user assistant system one two three four five six seven eight nine ten",
    "Grüße aus Köln, naïve café, 東京 🙂 👩‍👩‍👧",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMOLLM_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def byte_level() -> Tokenizer:
    """About 350 tokens, all 256 bytes among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken(" größer 東", special=False)])
    return tokenizer


@functools.cache
def byte_fallback(num_leading_blanks: int = 1) -> Tokenizer:
    """Pieces of whole characters, and the 256 bytes for all other characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁capital", "a", "e", "é", "東", "▁is", "s"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if num_leading_blanks:
        steps.append(decoders.Strip(" ", num_leading_blanks, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, *, template: str | None = SMOLLM_TEMPLATE, **settings: Any) -> Path:
    """`tokenizer.json` and `tokenizer_config.json` in `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **settings}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
