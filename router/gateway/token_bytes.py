"""The bytes that each token stands for: what makes incremental decoding exact.

A tokenizer's decoder works on a whole sequence; here its steps are applied to one token at a time, which gives the same text because the
decoders of the models Baton runs are concatenations (byte-level BPE, or pieces with byte fallback). A decoder that is not is refused by
name at start.
"""

from __future__ import annotations

import functools
import json
import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import Tokenizer

from cluster.errors import ConfigError

_KNOWN: Final = "ByteLevel, ByteFallback, Replace, Fuse, Strip after Fuse, and Sequence of these"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Piece = bytes | str  # bytes are final; text goes on through the later steps
Step = Callable[[Piece], Piece]


@functools.cache
def _byte_level_alphabet() -> Mapping[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(printable)]
    return {**{chr(value): value for value in printable}, **{chr(256 + index): value for index, value in enumerate(hidden)}}


def _byte_level(piece: Piece) -> Piece:
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes(map(_byte_level_alphabet().__getitem__, piece))
    except KeyError:
        return piece  # an added token holds its own text


def _byte_fallback(piece: Piece) -> Piece:
    match = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(match[1], 16)]) if match else piece


def _replace(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _fuse(piece: Piece) -> Piece:
    return piece  # joins all tokens: a concatenation does that by itself


_PLAIN_STEPS: Final[Mapping[str, Step]] = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback, "Fuse": _fuse}


class TokenBytes:
    """Token id → bytes, and how many leading blanks of a whole text are dropped.

    All of them are worked out at once and kept end to end: a tenth of what as many `bytes` in a dict would take, and nothing that grows
    for hours, as tokens come for the first time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ConfigError: the tokenizer's decoder is not one of the known ones.
        """
        self._tokenizer = tokenizer
        self.num_leading_blanks = 0
        self._is_fused = False  # from here on the decoder's steps see the whole text
        description = json.loads(tokenizer.to_str())
        self._steps = self._build(description["decoder"])
        special = (added["id"] for added in description["added_tokens"] if added["special"])
        self.special_ids = frozenset(special)
        self._all, self._ends = self._table()

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id that the tokenizer does not know (models pad their vocabularies)."""
        if token_id >= len(self._ends):
            return b""
        return self._all[self._ends[token_id - 1] if token_id else 0 : self._ends[token_id]]

    def _table(self) -> tuple[bytes, array[int]]:
        """The bytes of all tokens by id, joined, and where each one ends."""
        joined, ends = bytearray(), array("I")
        for token_id in range(max(self._tokenizer.get_vocab().values(), default=-1) + 1):
            joined += self._compute(token_id)
            ends.append(len(joined))
        return bytes(joined), ends

    def _compute(self, token_id: int) -> bytes:
        piece: Piece | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        for step in self._steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode()

    def _build(self, decoder: dict[str, Any] | None) -> list[Step]:
        match decoder:
            case {"type": "Sequence", "decoders": list(parts)}:
                return [step for part in parts for step in self._build(part)]
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse" as name}:
                self._is_fused = self._is_fused or name == "Fuse"
                return [_PLAIN_STEPS[name]]
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                return [_replace(old, new)]
            case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if self._is_fused:
                self.num_leading_blanks = count
                return []
        name = decoder["type"] if decoder else "none"
        raise ConfigError(f"model: the tokenizer's decoder {name} is not supported (known: {_KNOWN})", param="model")
