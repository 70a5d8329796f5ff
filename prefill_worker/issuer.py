"""Makes the tickets of one prefill worker: all that a reader must know to find the KV and to see that it fits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket
from cluster.types import Request


@dataclass(frozen=True, slots=True)
class TicketIssuer:
    """What all tickets of one life of a worker have in common."""

    incarnation: str
    endpoint: str
    layout: KVLayout
    checkpoint: str
    domain: str
    lease_s: float

    def offer(self, request: Request, blocks: tuple[BlockRef, ...]) -> KVTicket:
        """A ticket without a first token, for `blocks` that will hold the prompt of `request`."""
        return KVTicket(
            request_id=request.request_id,
            attempt=request.attempt,
            nonce=secrets.token_bytes(16),
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            blocks=blocks[: self.layout.num_blocks_for(request.num_prompt_tokens)],
            num_tokens=request.num_prompt_tokens,
            layout=self.layout,
            checkpoint=self.checkpoint,
            domain=self.domain,
            lease_s=self.lease_s,
        )
