"""The gateway's side of the router: typed calls over anything that carries bytes (a Serve handle, or the service in process).

A router that restarts is ridden out: a call that does not reach it is repeated for a few seconds. Every call may be (an admit takes the
place of the one before), and the next life of the router knows nothing of what was queued: submitting it again, with the time it has
waited, is the gateway's part of the recovery.

Errors come back as the class that the router raised. Order matters in two places, and is the caller's: `finish` ends a request
whatever its attempt, so it is awaited before the same id is admitted again; and cancelling `admit` is followed by `finish`, in case the
answer was on its way.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from cluster.errors import InternalError, NoCapacity, StaleEpoch
from cluster.types import AdmitRequest, Placement
from cluster.wire import WireError, decode, encode
from router.control.messages import Heartbeat, HeartbeatReply, LiveRequest, Method, Ready, Redirect, RequestName, unseal

Call = Callable[[str, bytes], Awaitable[bytes]]
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.5


class RouterClient:
    """The router's calls."""

    def __init__(self, call: Call, *, patience_s: float = 0.0) -> None:
        """
        Args:
            call: `call(method, payload)`, which raises NoCapacity when the router cannot be reached.
            patience_s: for how long, after the first failure, an unreachable router is called again.
        """
        self._call = call
        self._patience_s = patience_s

    async def admit(self, request: AdmitRequest) -> Placement:
        """See `Router.admit`. A router that took this gateway for dead, while it was stopped, is asked again."""
        submissions = _submissions(request)
        while True:
            try:
                return decode(Placement, await self._patiently(Method.ADMIT, submissions))
            except StaleEpoch:
                continue

    async def prefill_done(self, request_id: str) -> None:
        """The decode worker has taken the request's KV. Idempotent."""
        await self._send(Method.PREFILL_DONE, encode(RequestName(request_id)))

    async def redirect(self, redirect: Redirect) -> Placement:
        """See `Router.redirect`."""
        return decode(Placement, await self._send(Method.REDIRECT, encode(redirect)))

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
        return await self._patiently(method, itertools.repeat(payload))

    async def _patiently(self, method: Method, payloads: Iterator[bytes]) -> bytes:
        """The router's answer. What it refuses itself, with NoCapacity too, comes in the envelope and is not repeated."""
        sealed = await self._reach(method, next(payloads))
        give_up_s = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while isinstance(sealed, NoCapacity):
            if time.monotonic() + pause_s > give_up_s:
                raise sealed
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            sealed = await self._reach(method, next(payloads))
        try:
            return unseal(sealed)
        except WireError as error:
            raise InternalError(f"the router answered {method.value} with something else: {error}") from error

    async def _reach(self, method: Method, payload: bytes) -> bytes | NoCapacity:
        try:
            return await self._call(method.value, payload)
        except NoCapacity as error:
            return error


def _submissions(request: AdmitRequest) -> Iterator[bytes]:
    """The request as it is submitted, and again: then with the time that it has waited since the first."""
    started_s = time.monotonic()
    yield encode(request)
    while True:
        yield encode(replace(request, waited_s=time.monotonic() - started_s))
