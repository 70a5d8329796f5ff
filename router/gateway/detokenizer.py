"""Token ids → text, one token at a time (at most one character behind the tokens)."""

from __future__ import annotations

import codecs

from router.gateway.token_bytes import TokenBytes


class Detokenizer:
    """The text of one sequence as it grows.

    The parts that `push` and `flush` return add up to the text of the whole sequence. A character split over tokens comes out with its last
    token; bytes that can be no character become U+FFFD. Constant time for each token.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = token_bytes
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_leading_blanks = token_bytes.num_leading_blanks

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""
        if token_id in self._skipped:
            return ""
        return self._trim(self._decoder.decode(self._token_bytes[token_id]))

    def flush(self) -> str:
        """The rest, when no token follows: U+FFFD for a character that was never finished."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while text and self._num_leading_blanks > 0:
            if text[0] != " ":
                self._num_leading_blanks = 0
                break
            text = text[1:]
            self._num_leading_blanks -= 1
        return text
