"""gRPC between Baton's processes: channels and servers that carry the cluster secret, and errors that keep their class.

An error crosses as a status code plus trailing metadata `baton-error-code` (and `-param`, `-retry-after-s`), so that the caller gets
back the very class of `cluster.errors` that the callee raised; any other failure of a call is mapped once, in `error_of`. Metadata is
ASCII, so the secret and names of fields are percent-encoded in it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import quote, unquote

import grpc
from grpc import aio

from cluster.errors import BatonError, ClientGone, DeadlineExceeded, InternalError, NoCapacity, Unauthorized, WrongIncarnation, from_code

T = TypeVar("T")

SECRET_KEY: Final = "x-baton-secret"
_CODE_KEY: Final = "baton-error-code"
_PARAM_KEY: Final = "baton-error-param"
_RETRY_KEY: Final = "baton-error-retry-after-s"

# What grpc.aio makes of an operation on a call whose connection was just closed. It says that itself; nobody has answered.
_CLOSED_BELOW: Final = "Internal error from Core"

# Characters, each of which may take nine bytes: a peer refuses metadata beyond 8 KiB.
_MAX_MESSAGE: Final = 500
_MAX_PARAM: Final = 200

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.so_reuseport", 0),  # two workers must never share a port
    ("grpc.enable_http_proxy", 0),
)

# Finds out within 15 s that the other side is gone without a word (its host died, its process is stopped), which ends its calls.
KEEPALIVE: Final = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000), ("grpc.http2.ping_timeout_ms", 5_000))


def channel(endpoint: str, *options: tuple[str, int]) -> aio.Channel:
    """A channel to a worker's endpoint. Reconnects are quick: a worker that restarts has another port anyway."""
    return aio.insecure_channel(endpoint, options=[*_OPTIONS, ("grpc.max_reconnect_backoff_ms", 1000), *options])


async def read(call: aio.UnaryStreamCall[Any, T] | aio.StreamStreamCall[Any, T]) -> T | None:
    """The next message of a stream; None when it ended well. Raises AioRpcError. Whoever is cancelled in it has to cancel the call."""
    # Shielded: grpc.aio never frees a read whose awaiter is cancelled (grpc/grpc#43360), but one that ends with its call it does.
    message: Any = await asyncio.shield(call.read())
    return None if message is aio.EOF else message  # type: ignore[attr-defined]  # the stubs lack EOF


def secret_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata that every internal call carries."""
    return ((SECRET_KEY, quote(secret)),)


def server(secret: str, *interceptors: aio.ServerInterceptor) -> aio.Server:  # type: ignore[type-arg]  # generic in the stubs alone
    """A server that answers only calls with the cluster secret; `interceptors` see those that have it."""
    return aio.server(interceptors=[_SecretInterceptor(secret), *interceptors], options=[*_OPTIONS, *KEEPALIVE])


class _SecretInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses calls without the secret before their handler runs."""

    def __init__(self, secret: str) -> None:
        self._secret = quote(secret).encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = dict(handler_call_details.invocation_metadata or ()).get(SECRET_KEY, "")
        handler = await continuation(handler_call_details)
        data = given if isinstance(given, bytes) else given.encode()
        if handler is None or hmac.compare_digest(data, self._secret):
            return handler
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: Any, context: aio.ServicerContext[Any, Any]) -> NoReturn:
        await abort(context, Unauthorized("the cluster secret is missing or wrong"))

    async def refuse_stream(_request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await abort(context, Unauthorized("the cluster secret is missing or wrong"))
        yield

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)


def check_incarnation(named: str, ours: str) -> None:
    """Raises:
    WrongIncarnation: a call's header names another life than ours.
    """
    if named != ours:
        raise WrongIncarnation(f"this is incarnation {ours}, not {named or '(none)'}", param="incarnation")


async def abort(context: aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call with `error`."""
    metadata = [(_CODE_KEY, error.code)]
    if error.param is not None:
        metadata.append((_PARAM_KEY, quote(_shortened(error.param, _MAX_PARAM))))
    if error.retry_after_s is not None:
        metadata.append((_RETRY_KEY, repr(error.retry_after_s)))
    await context.abort(getattr(grpc.StatusCode, error.grpc_status), _shortened(error.message, _MAX_MESSAGE), tuple(metadata))
    raise AssertionError("context.abort returned")


@asynccontextmanager
async def answering(context: aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """The body of a handler: a `BatonError` raised in it ends the call with that error."""
    try:
        yield
    except BatonError as error:
        await abort(context, error)


def error_of(failure: aio.AioRpcError) -> BatonError:
    """What a failed call means: the callee's own error, or what the status says of the connection."""
    trailing: dict[str, Any] = dict(tuple(pair) for pair in failure.trailing_metadata() or ())  # type: ignore[misc, arg-type]
    message = failure.details() or failure.code().name
    if _CODE_KEY in trailing:
        param = trailing.get(_PARAM_KEY)
        return from_code(
            str(trailing[_CODE_KEY]),
            message,
            param=None if param is None else unquote(str(param)),
            retry_after_s=_seconds(trailing.get(_RETRY_KEY)),
        )
    match failure.code():
        case grpc.StatusCode.UNAVAILABLE:
            return NoCapacity("a worker cannot be reached", retry_after_s=1.0)  # the cause, with addresses, stays inside
        case grpc.StatusCode.INTERNAL if failure.details() == _CLOSED_BELOW:
            return NoCapacity("a worker cannot be reached", retry_after_s=1.0)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the request's deadline passed at the worker")
        case grpc.StatusCode.CANCELLED:
            return ClientGone(message)
        case _:
            return InternalError(f"worker call failed: {failure.code().name}: {message}")


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _seconds(text: object) -> float | None:
    try:
        return None if text is None else float(str(text))
    except ValueError:
        return None
