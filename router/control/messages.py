"""What crosses between gateways and the router: msgpack of these, inside an envelope that carries a value or an error.

Serve would pickle an exception and lose its fields on the way; the envelope keeps the class, message, `param` and `retry_after_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import BatonError, from_code
from cluster.types import AdmitRequest, Placement
from cluster.wire import decode, encode


class Method(StrEnum):
    """The router's calls, by their names on the wire."""

    ADMIT = "admit"
    PREFILL_DONE = "prefill_done"
    REDIRECT = "redirect"
    FINISH = "finish"
    HEARTBEAT = "heartbeat"
    SNAPSHOT = "snapshot"
    READY = "ready"


class Phase(StrEnum):
    """Which leg of a placed request runs. `prefill` ends when the KV is taken: the prefill worker holds nothing of it any more."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RequestName:
    request_id: str


@dataclass(frozen=True, slots=True)
class Redirect:
    """A decode worker declined, or is gone; the KV still waits at the prefill worker."""

    request_id: str
    declined_incarnation: str
    retry_after_s: float
    is_unreachable: bool = False  # gone, as far as the gateway can tell


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A placed request as its gateway knows it: all that a router which does not know it needs."""

    request: AdmitRequest
    placement: Placement
    phase: Phase


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A gateway is alive and holds these placements. Whole entries are sent only for ids that the router asked for."""

    gateway_id: str
    live_ids: tuple[str, ...]
    entries: tuple[LiveRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`unknown_ids`: of the live ones, those that this life of the router has no placement for."""

    router_epoch: int
    unknown_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Whether new requests can be placed; else why not."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A `BatonError` on the wire."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Envelope:
    """A reply: `value` unless `error` is set."""

    value: bytes = b""
    error: ErrorRow | None = None


def seal(value: bytes) -> bytes:
    """The envelope of a success."""
    return encode(Envelope(value=value))


def seal_error(error: BatonError) -> bytes:
    """The envelope of a failure."""
    return encode(Envelope(error=ErrorRow(error.code, error.message, error.param, error.retry_after_s)))


def unseal(data: bytes) -> bytes:
    """The value.

    Raises:
        BatonError: the very class that the other side raised.
        WireError: not an envelope.
    """
    envelope = decode(Envelope, data)
    if envelope.error is None:
        return envelope.value
    row = envelope.error
    raise from_code(row.code, row.message, param=row.param, retry_after_s=row.retry_after_s)
