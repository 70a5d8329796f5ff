"""The KV layout and the ticket that hands blocks from a prefill worker to a decode worker (promises P1, P3).

A block's bytes are `[layer][K | V][kv_head]{data, then its scales, padded to 64}`, contiguous for all layers: a handoff is a few
large pieces, and one layer of a block is a slice of it. Memory order is wire order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgpack

from cluster.errors import TicketMismatch
from cluster.types import TokenOutput
from cluster.wire import WireError, decode, encode

KV_DTYPE_BYTES: Final = {"float32": 4, "bf16": 2, "int8": 1}
_SCALE_BYTES: Final = {"float32": 0, "bf16": 0, "int8": 2}  # one fp16 per token and head
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where everything lies in a block. Two workers may hand blocks over unchanged when their fingerprints are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    kv_dtype: str  # a key of KV_DTYPE_BYTES
    # Order inside one head's data. "rows": [block_size, head_dim]. "vnni", as dot-product instructions want it: K is
    # [head_dim / k, block_size, k] with k = 2 in bf16, 4 in int8 (bytes with zero point 128), V is [block_size / 2, head_dim, 2].
    packing: str = "rows"

    @property
    def data_bytes(self) -> int:
        """Bytes of one head's data in one block, without scales and padding."""
        return self.block_size * self.head_dim * KV_DTYPE_BYTES[self.kv_dtype]

    @property
    def head_stride(self) -> int:
        """Bytes from one KV head to the next."""
        used = self.data_bytes + self.block_size * _SCALE_BYTES[self.kv_dtype]
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @property
    def kv_stride(self) -> int:
        """Bytes from K to V."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer to the next."""
        return 2 * self.kv_stride

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.layer_stride

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> str:
        """32 hex digits, equal exactly when the block bytes mean the same."""
        fields = [getattr(self, name) for name in self.__slots__]
        return hashlib.blake2b(msgpack.packb(fields), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block and how often it had been given out when this reference was made: a reused block has another generation."""

    block_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class KVTicket:
    """The right to read the KV of one attempt's prompt, once, while its lease lives.

    `first_token` is None in the offer (blocks are promised, not computed yet) and set once the prompt is done.
    """

    request_id: str
    attempt: int
    nonce: bytes  # 128 random bits
    incarnation: str  # of the prefill worker
    endpoint: str  # of the prefill worker's KV service
    blocks: tuple[BlockRef, ...]
    num_tokens: int  # prompt tokens the blocks hold
    layout: str  # KVLayout.fingerprint()
    checkpoint: str
    domain: str  # of the prefill worker: the KV's numerics
    lease_s: float  # from the first token, unless renewed; enforced by the prefill worker alone
    first_token: TokenOutput | None = None
    checksums: tuple[int, ...] = ()  # CRC-32 of each block, when the config asks for them

    @property
    def key(self) -> str:
        """`Request.key` of the attempt."""
        return f"{self.request_id}/{self.attempt}"

    @staticmethod
    def unpack(data: bytes) -> KVTicket:
        """The ticket that came over a wire.

        Raises:
            TicketMismatch: `data` is no ticket.
        """
        try:
            return decode(KVTicket, data)
        except WireError as error:
            raise TicketMismatch(str(error), param="ticket") from error

    def digest(self) -> bytes:
        """128 bits over every field: the commit proves with it that reader and owner mean the same blocks."""
        return hashlib.blake2b(encode(self), digest_size=16).digest()
