"""Where faults can be injected into a handoff, and what they can do there."""

from __future__ import annotations

from enum import StrEnum

from cluster.errors import BatonError, NoCapacity, TransferError


class FaultAction(StrEnum):
    """What happens at a point."""

    DELAY = "delay"  # nothing, for a while
    DROP = "drop"  # what was due there is lost, as when its connection breaks
    CORRUPT = "corrupt"  # one byte of what travels is changed
    KILL = "kill"  # SIGKILL to the worker's own process


class FaultPoint(StrEnum):
    """A moment of a handoff. Delay, drop and kill make sense at each; corrupt where bytes travel that their receiver can judge.

    offer          prefill worker, before it offers its blocks. Drop: its stream breaks. Corrupt: the offered ticket
    first_token    prefill worker, before it says the first token of a request that goes on; the lease lives. Drop: its stream breaks.
                   Corrupt: the ticket, which a decode worker that follows the offer does not need
    follow         prefill worker, before it completes the ticket to the decode worker that follows its offer. Drop: that stream breaks.
                   Corrupt: the ticket
    lease.renew    prefill worker, before a renewal counts. Drop: the call breaks, the lease is not renewed
    release        prefill worker, after the commit, before its answer. Drop: the answer is lost
    fetch.start    decode worker, its blocks reserved, before it reads. Drop: the prefill worker cannot be reached
    fetch.chunk    decode worker, after each read of blocks, before it checks them. Drop: the read fails. Corrupt: a byte of the blocks,
                   which only checksums tell
    commit         decode worker, before each try of the commit. Drop: the try is lost
    decode.taken   decode worker, after the commit, before it says so to the gateway. Drop: its stream breaks
    decode.tokens  decode worker, before each message with tokens. Drop: its stream breaks
    """

    OFFER = "offer"
    FIRST_TOKEN = "first_token"
    FOLLOW = "follow"
    LEASE_RENEW = "lease.renew"
    RELEASE = "release"
    FETCH_START = "fetch.start"
    FETCH_CHUNK = "fetch.chunk"
    COMMIT = "commit"
    DECODE_TAKEN = "decode.taken"
    DECODE_TOKENS = "decode.tokens"

    @property
    def actions(self) -> frozenset[FaultAction]:
        """What makes sense here."""
        everywhere = {FaultAction.DELAY, FaultAction.DROP, FaultAction.KILL}
        return frozenset(everywhere | {FaultAction.CORRUPT} if self in _CARRIERS else everywhere)

    @property
    def is_in_handoff(self) -> bool:
        """Whether it lies between two workers: one that does both never comes to it."""
        return self is not FaultPoint.DECODE_TOKENS

    def lost(self) -> BatonError:
        """What a drop raises here: as if a connection had broken, which callers see as UNAVAILABLE."""
        error = TransferError if self in _FROM_PREFILL else NoCapacity
        return error(f"lost at {self} (injected fault)")


_CARRIERS = frozenset({FaultPoint.OFFER, FaultPoint.FIRST_TOKEN, FaultPoint.FOLLOW, FaultPoint.FETCH_CHUNK})
_FROM_PREFILL = frozenset({FaultPoint.FETCH_START, FaultPoint.FETCH_CHUNK, FaultPoint.COMMIT})  # calls to a prefill worker
