"""Prefix keys: the name of a full block of KV, equal on every worker exactly when the KV is.

A key covers all tokens up to the block's end through its parent's key, and the numerics domain, checkpoint and tenant through the root.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_key(*, checkpoint: str, domain: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """The parent of a sequence's first block (16 bytes). Blocks of different roots are never shared."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (checkpoint, domain, adapter, cache_salt):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the block that holds `token_ids` after `parent` (keyed blake2b, 128 bits)."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), key=parent, digest_size=16).digest()
