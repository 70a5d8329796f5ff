"""Every error Baton can answer with, and the one table that maps it to HTTP and gRPC (promise P8).

    BatonError
    ├── RequestError            the client's to fix: a retry of the same request cannot help
    │   ├── InvalidRequest      400  a parameter is wrong; names the field
    │   ├── ContextTooLong      400  prompt + max_tokens beyond the context of a pool
    │   ├── Unauthorized        401
    │   ├── ModelNotFound       404
    │   └── BodyTooLarge        413
    ├── DeadlineExceeded        408
    ├── Overloaded              429  a bound of the queue is reached; Retry-After
    ├── ClientGone              499
    ├── NoCapacity              503  no worker of a pool can serve now
    ├── InternalError           500  our bug
    ├── WorkerRefusal                a worker's typed no; the gateway tries elsewhere
    │   ├── WrongIncarnation         the address answers, but with another life of the worker
    │   ├── StaleEpoch               the placement is from an older life of the router
    │   └── Draining                 the worker takes no new work
    ├── TransferError                moving KV blocks failed; the prompt is prefilled again
    │   ├── TicketMismatch           wrong model, layout, request or owner; names the field
    │   ├── TicketStale              expired, released or taken: the blocks may hold other data
    │   └── PlaneUnavailable         this pair cannot use this data plane
    └── ConfigError                  names the key; only ever raised at start

Errors cross worker gRPC as a status plus the trailing metadata key `baton-error-code` (see `cluster.rpc`);
`from_code` restores the class. An error that reaches a client without a row in the table is an InternalError.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of the tree. `code` names the class on every wire; the other fields are its row of the table."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "server_error"
    should_retry: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(BatonError):
    """The request itself is at fault."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field has a wrong type or value, or is one that Baton would have to ignore."""


class ContextTooLong(RequestError):
    """Prompt and requested output do not fit the context."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The API key or the cluster secret is missing or wrong."""

    code = "unauthorized"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    openai_type = "authentication_error"


class ModelNotFound(RequestError):
    """No such model is served here."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class BodyTooLarge(RequestError):
    """The body of an HTTP request is over the configured limit."""

    code = "body_too_large"
    http_status = 413


class DeadlineExceeded(BatonError):
    """The request's own deadline passed."""

    code = "deadline_exceeded"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"


class Overloaded(BatonError):
    """The queue is full, by count or by tokens."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    should_retry = True


class ClientGone(BatonError):
    """The client went away; nobody reads this answer."""

    code = "client_gone"
    http_status = 499
    grpc_status = "CANCELLED"


class NoCapacity(BatonError):
    """No live worker of a pool can take the request."""

    code = "no_capacity"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    should_retry = True


class InternalError(BatonError):
    """A bug of ours."""


class WorkerRefusal(NoCapacity):
    """A worker's typed refusal; reaches a client only when no other worker is left."""

    code = "worker_refusal"


class WrongIncarnation(WorkerRefusal):
    """The endpoint belongs to another life of the worker than the placement names."""

    code = "wrong_incarnation"


class StaleEpoch(WorkerRefusal):
    """The placement was made by an older life of the router."""

    code = "stale_epoch"


class Draining(WorkerRefusal):
    """The worker is about to stop and takes no new work."""

    code = "draining"


class TransferError(NoCapacity):
    """KV blocks could not be moved."""

    code = "transfer_failed"


class TicketMismatch(TransferError):
    """The ticket does not describe this request on these workers; `param` names the field that differs."""

    code = "ticket_mismatch"


class TicketStale(TransferError):
    """The lease behind the ticket is over, so its blocks may hold another prompt."""

    code = "ticket_stale"


class PlaneUnavailable(TransferError):
    """This pair of workers cannot use this data plane."""

    code = "plane_unavailable"


class ConfigError(BatonError):
    """The configuration cannot work; `param` is the dotted key."""

    code = "config_error"


def _all_classes(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_classes(child))]


_BY_CODE = {cls.code: cls for cls in _all_classes(BatonError) if "code" in vars(cls)}
_BY_CODE["internal_error"] = InternalError
_BY_CODE["invalid_request"] = InvalidRequest


def from_code(code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> BatonError:
    """The error that `code` names; an InternalError for a code of no row."""
    cls = _BY_CODE.get(code, InternalError)
    return cls(message, param=param, retry_after_s=retry_after_s)
