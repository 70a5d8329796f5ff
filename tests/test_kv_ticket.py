"""The ticket's name."""

from __future__ import annotations

from cluster.kv_layout import KVLayout
from cluster.kv_ticket import BlockRef, KVTicket


def test_ticket_key_is_the_requests() -> None:
    ticket = KVTicket("r", 3, bytes(16), "i", "e", (BlockRef(1, 2),), 5, KVLayout(2, 2, 16, 8, "bf16"), "c", "d", 30.0)
    assert ticket.key == "r/3"
