"""The folder made from a GGUF file, against transformers reading the same facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from cluster.errors import ConfigError
from cluster.model_config import ModelConfig
from deploy.gguf_import import import_gguf
from deploy.gguf_tokenizer import build_tokenizer
from tests.deploy.tiny_gguf import CONTROL, MERGES, tokens, write_gguf

METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": tokens(),
    "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens()) - len(CONTROL) - 1) + [4],
    "tokenizer.ggml.merges": list(MERGES),
    "tokenizer.ggml.bos_token_id": 1,
}


def imported(folder: Path, **changes: Any) -> Path:
    import_gguf(write_gguf(folder / "model.gguf", **changes), folder)
    return folder


def tokenizer(pre: str, **changes: Any) -> Tokenizer:
    return build_tokenizer(METADATA | {"tokenizer.ggml.pre": pre} | changes)


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    config = ModelConfig.load(imported(tmp_path))
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == ("LlamaForCausalLM", 2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (1000.0, 1e-5, 128)
    assert config.vocab_size == len(tokens())
    assert config.tie_word_embeddings
    assert set(config.eos_token_ids) == {0, 2}, "the file's EOS, and the control token that ends a text"


def test_transformers_reads_the_same_config(tmp_path: Path) -> None:
    ours, theirs = ModelConfig.load(imported(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == ours.rope.theta
    assert (theirs.num_key_value_heads, theirs.head_dim, theirs.rms_norm_eps) == (ours.num_kv_heads, ours.head_dim, ours.rms_norm_eps)


def test_an_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    assert not ModelConfig.load(imported(tmp_path, tensors=("output.weight",))).tie_word_embeddings


def test_biases_are_told_by_their_tensors(tmp_path: Path) -> None:
    config = ModelConfig.load(imported(tmp_path, arch="qwen2", pre="qwen2", tensors=("blk.0.attn_q.bias",)))
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.qkv_bias
    assert not config.output_bias


def test_a_sliding_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    config = ModelConfig.load(imported(tmp_path, llama__attention__sliding_window=32))
    assert config.architecture == "MistralForCausalLM"
    assert config.sliding_windows == (32, 32)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"arch": "mamba"}, "mamba"),
        ({"pre": "no-such-split"}, "no-such-split"),
        ({"tokenizer__ggml__model": "llama"}, "llama"),
        ({"tensors": ("rope_freqs.weight",)}, "RoPE"),
        ({"llama__rope__scaling__type": "yarn"}, "RoPE"),
        ({"llama__context_length": None}, "llama.context_length"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        imported(tmp_path, **changes)
    assert caught.value.param == "model"


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all, but long enough to hold a header", b"GGUF\x03\x00\x00\x00"])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        import_gguf(path, tmp_path)


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    imported(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 7}


def test_smollm_splits_digits_before_merges() -> None:
    assert tokenizer("smollm").encode("123").tokens == ["1", "2", "3"]
    assert tokenizer("gpt-2").encode("123").tokens == ["123"]


def test_merges_apply_and_spaces_are_kept() -> None:
    assert tokenizer("smollm").encode("the the  in").tokens == ["t", "he", "Ġthe", "Ġ", "Ġ", "in"]


def test_control_tokens_are_matched_whole_and_hidden_on_request() -> None:
    made = tokenizer("smollm")
    encoded = made.encode("<|im_start|>in<think><|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "in", "<think>", "<|im_end|>"]
    assert made.decode(encoded.ids) == "in<think>"
    assert made.decode(encoded.ids, skip_special_tokens=False) == "<|im_start|>in<think><|im_end|>"


def test_bos_is_added_where_the_file_asks_for_it() -> None:
    assert tokenizer("smollm", **{"tokenizer.ggml.add_bos_token": True}).encode("in").tokens == ["<|im_start|>", "in"]
    assert tokenizer("smollm").encode("in").tokens == ["in"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
@given(text=st.text(max_size=60))
def test_any_text_survives(pre: str, text: str) -> None:
    made = tokenizer(pre)
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_builds_the_same_tokenizer(tmp_path: Path) -> None:
    """Of `gpt-2` only: transformers knows no split for `smollm`, and takes this one instead."""
    path = write_gguf(tmp_path / "model.gguf", pre="gpt-2")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = tokenizer("gpt-2")
    for text in ("the the  in", "  x\n\n", "12345 in1 2", "naïve 漢字 👩‍👩‍👧 \t\r\n", "<|im_start|>user\nthe<|im_end|>", "it's"):
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
