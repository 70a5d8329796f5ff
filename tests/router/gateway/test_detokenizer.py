"""Incremental decoding against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import functools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cluster.errors import ConfigError
from router.gateway.detokenizer import Detokenizer
from router.gateway.token_bytes import TokenBytes
from tests.router.gateway.tokenizers_in_code import byte_fallback, byte_level

BYTE_LEVEL_IDS = st.lists(st.integers(0, byte_level().get_vocab_size() + 5), max_size=30)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(token_bytes(tokenizer), skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(BYTE_LEVEL_IDS, st.booleans())
def test_byte_level_deltas_add_up_to_the_whole_for_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(tokenizer, ids, skip_special_tokens=skip)) == expected


@given(st.text(max_size=30))
def test_a_split_character_never_shows_as_replacement(text: str) -> None:
    if REPLACEMENT in text:
        return
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if any(token_id in token_bytes(tokenizer).special_ids for token_id in ids):
        return
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) and not any(REPLACEMENT in part for part in parts)


@given(st.lists(st.sampled_from(["the", " capital", " ", "  ", "é", "東京", "🙂", "a", "ß", "</s>"]), max_size=12), st.integers(0, 1))
def test_byte_fallback_deltas_add_up_to_the_whole_for_whole_characters(words: list[str], num_leading_blanks: int) -> None:
    tokenizer = byte_fallback(num_leading_blanks)
    ids = [token_id for word in words for token_id in pieces_of(tokenizer, word)]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


def pieces_of(tokenizer: Tokenizer, word: str) -> list[int]:
    """Each character's own piece where there is one, else its bytes."""
    whole = tokenizer.token_to_id(word)
    if whole is not None:
        return [whole]
    ids: list[int] = []
    for char in word:
        piece = tokenizer.token_to_id(char.replace(" ", "▁"))
        names = [] if piece is not None else [f"<0x{value:02X}>" for value in char.encode()]
        ids += [piece] if piece is not None else [tokenizer.get_vocab()[name] for name in names]
    return ids


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = byte_fallback()
    assert deltas(tokenizer, pieces_of(tokenizer, "🙂")) == ["", "", "", "🙂", ""]


def test_flush_shows_a_character_that_was_never_finished() -> None:
    tokenizer = byte_fallback()
    assert deltas(tokenizer, pieces_of(tokenizer, "🙂")[:3]) == ["", "", "", REPLACEMENT]


def test_ids_out_of_the_vocabulary_have_no_text() -> None:
    assert deltas(byte_level(), [100_000]) == ["", ""]


def test_every_token_has_its_bytes() -> None:
    tokenizer = byte_level()
    found = token_bytes(tokenizer)
    ids = [token_id for token_id in range(tokenizer.get_vocab_size()) if token_id not in found.special_ids]
    assert b"".join(found[token_id] for token_id in ids).decode(errors="replace") == tokenizer.decode(ids)


def test_tokens_that_come_for_the_first_time_take_no_memory() -> None:
    found = TokenBytes(byte_level())
    tracemalloc.start()
    try:
        for token_id in range(10_000):  # most are of no token: models pad their vocabularies
            found[token_id]
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 1024


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Strip(" ", 1, 0), None])
def test_decoders_that_are_no_concatenation_are_refused_by_name(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match="decoder"):
        TokenBytes(tokenizer)
