"""A Hugging Face tokenizer from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges and the kind of every token, but not how text is split before the merges apply; it only
names that step (`tokenizer.ggml.pre`). The table below says what the names mean. A name that is not in it is refused: a wrong split
still encodes and decodes, with other tokens than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from cluster.errors import ConfigError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _by_regex(split: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(split), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


_PRE_TOKENIZERS: Final[Mapping[str, list[Any]]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": _by_regex(_LLAMA3_SPLIT),
    "qwen2": _by_regex(_QWEN2_SPLIT),
}
_END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` (keys as in the file) describes.

    Raises:
        ConfigError: for `model`, when the file's kind of vocabulary or of split is unknown.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ConfigError(f"the GGUF file has a {kind!r} vocabulary; known: gpt2. Put its tokenizer.json beside it", param="model")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"the GGUF file splits text by {pre!r}; known: {', '.join(_PRE_TOKENIZERS)}. Put its tokenizer.json beside it", param="model"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    if metadata.get("tokenizer.ggml.add_bos_token") and (bos := special_token(metadata, "bos")) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: Any) -> None:
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    for token, kind in added:
        entry = AddedToken(token, normalized=False, special=kind == _CONTROL)
        if kind == _CONTROL:
            tokenizer.add_special_tokens([entry])
        else:
            tokenizer.add_tokens([entry])


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the `bos`, `eos`, `unknown` or `padding` token; None when the file names none."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if token_id is None else str(metadata["tokenizer.ggml.tokens"][token_id])


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: the chat template and the special tokens' texts."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special_token(metadata, "bos"),
        "eos_token": special_token(metadata, "eos"),
        "unk_token": special_token(metadata, "unknown"),
        "pad_token": special_token(metadata, "padding"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every token that ends a text: the file's own, and the control tokens that end a turn in chat templates."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    turns = (
        i for i, (t, k) in enumerate(zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False)) if k == _CONTROL and t in _END_OF_TURN
    )
    return list(dict.fromkeys([int(i) for i in named if i is not None] + list(turns)))
