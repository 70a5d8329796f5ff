"""The gateway's side of the router: typed calls over anything that carries bytes (a Serve handle, or the service in process).

Errors come back as the class that the router raised. Order matters in two places, and is the caller's: `finish` ends a request
whatever its attempt, so it is awaited before the same id is admitted again; and cancelling `admit` is followed by `finish`, in case the
answer was on its way.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cluster.errors import InternalError
from cluster.types import AdmitRequest, Placement
from cluster.wire import WireError, decode, encode
from router.control.messages import Heartbeat, HeartbeatReply, LiveRequest, Method, Ready, Redirect, RequestName, unseal

Call = Callable[[str, bytes], Awaitable[bytes]]


class RouterClient:
    """The router's calls. `call(method, payload)` raises NoCapacity when the router cannot be reached."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def admit(self, request: AdmitRequest) -> Placement:
        """See `Router.admit`."""
        return decode(Placement, await self._send(Method.ADMIT, encode(request)))

    async def prefill_done(self, request_id: str) -> None:
        """The decode worker has taken the request's KV. Idempotent."""
        await self._send(Method.PREFILL_DONE, encode(RequestName(request_id)))

    async def redirect(self, request_id: str, declined_incarnation: str, retry_after_s: float) -> Placement:
        """See `Router.redirect`."""
        message = Redirect(request_id, declined_incarnation, retry_after_s)
        return decode(Placement, await self._send(Method.REDIRECT, encode(message)))

    async def finish(self, request_id: str) -> None:
        """The request is over, however it went. Idempotent."""
        await self._send(Method.FINISH, encode(RequestName(request_id)))

    async def heartbeat(self, gateway_id: str, live: Sequence[LiveRequest]) -> int:
        """Says that the gateway lives and which placements it holds; to be called every few seconds. The router's epoch."""
        ids = tuple(entry.request.request_id for entry in live)
        reply = await self._beat(Heartbeat(gateway_id, ids))
        unknown = frozenset(reply.unknown_ids)
        if unknown:
            entries = tuple(entry for entry in live if entry.request.request_id in unknown)
            reply = await self._beat(Heartbeat(gateway_id, ids, entries))
        return reply.router_epoch

    async def snapshot(self) -> dict[str, Any]:
        """See `Router.snapshot`."""
        books: dict[str, Any] = json.loads(await self._send(Method.SNAPSHOT, b""))
        return books

    async def ready(self) -> Ready:
        """See `Router.ready`."""
        return decode(Ready, await self._send(Method.READY, b""))

    async def _beat(self, beat: Heartbeat) -> HeartbeatReply:
        return decode(HeartbeatReply, await self._send(Method.HEARTBEAT, encode(beat)))

    async def _send(self, method: Method, payload: bytes) -> bytes:
        try:
            return unseal(await self._call(method.value, payload))
        except WireError as error:
            raise InternalError(f"the router answered {method.value} with something else: {error}") from error
