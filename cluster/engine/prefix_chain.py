"""The prefix keys of one sequence's full blocks, made as its tokens become known."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.prefix import block_key


class PrefixChain:
    """Keys under one root. Only ever grows: a full block's tokens never change."""

    def __init__(self, root: bytes, block_size: int, max_tokens: int | None = None) -> None:
        """
        Args:
            root: `cluster.prefix.root_key` of the domain that computes the KV.
            block_size: tokens in a block.
            max_tokens: tokens from here on are computed in another domain than the root's, so their blocks get no key.
        """
        self._root = root
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._keys: list[bytes] = []

    def keys(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Keys of the full blocks within the first `num_tokens` of `token_ids`, in order."""
        if self._max_tokens is not None:
            num_tokens = min(num_tokens, self._max_tokens)
        num_blocks = num_tokens // self._block_size
        while len(self._keys) < num_blocks:
            start = len(self._keys) * self._block_size
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(block_key(parent, token_ids[start : start + self._block_size]))
        return self._keys[:num_blocks]
