"""The ticket that hands blocks from a prefill worker to a decode worker (promises P1, P3)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace

from cluster.errors import TicketMismatch
from cluster.kv_layout import KVLayout
from cluster.types import TokenOutput
from cluster.wire import WireError, decode, encode


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
    layout: KVLayout  # of the blocks
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
            TicketMismatch: `data` is no ticket, or not as one is packed: damage to a field's name would pass for a field left out.
        """
        try:
            ticket = decode(KVTicket, data)
        except WireError as error:
            raise TicketMismatch(str(error), param="ticket") from error
        if encode(ticket) != data:
            raise TicketMismatch("the ticket was not packed by a worker of ours", param="ticket")
        return ticket

    def as_offered(self) -> KVTicket:
        """Its form before the prompt was computed."""
        return replace(self, first_token=None, checksums=())

    def check_is(self, offered: KVTicket) -> None:
        """
        Raises:
            TicketMismatch: it is not `offered`; names the field.
        """
        for field in fields(self):
            if getattr(self, field.name) != getattr(offered, field.name):
                raise TicketMismatch(f"the ticket's {field.name} is not what was offered", param=field.name)

    def digest(self) -> bytes:
        """128 bits over every field: the commit proves with it that reader and owner mean the same blocks."""
        return hashlib.blake2b(encode(self), digest_size=16).digest()
