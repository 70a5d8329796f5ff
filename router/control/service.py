"""The router's calls as bytes: what the Serve deployment hands in and out, and what tests call in process."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from cluster.errors import BatonError, InternalError, InvalidRequest
from cluster.types import AdmitRequest, WorkerLoad
from cluster.wire import WireError, decode, encode
from router.control.messages import Heartbeat, Method, Redirect, RequestName, seal, seal_error
from router.control.router import Router

_log = logging.getLogger(__name__)


class RouterService:
    """`Router` behind bytes: msgpack of `messages` in, an envelope out."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._handlers: Final[Mapping[str, Callable[[bytes], Awaitable[bytes]]]] = {
            Method.ADMIT: self._admit,
            Method.PREFILL_DONE: self._prefill_done,
            Method.REDIRECT: self._redirect,
            Method.FINISH: self._finish,
            Method.HEARTBEAT: self._heartbeat,
            Method.SNAPSHOT: self._snapshot,
            Method.READY: self._ready,
        }

    async def call(self, method: str, payload: bytes) -> bytes:
        """One call; never raises but when cancelled."""
        handler = self._handlers.get(method)
        if handler is None:
            return seal_error(InvalidRequest(f"the router has no call {method!r}", param="method"))
        try:
            return seal(await handler(payload))
        except BatonError as error:
            return seal_error(error)
        except WireError as error:
            return seal_error(InternalError(f"{method}: {error}"))
        except Exception as error:  # a bug of ours: the caller gets a 500, the log the traceback
            _log.exception("router call %s failed", method)
            return seal_error(InternalError(f"{method}: {type(error).__name__}: {error}"))

    def report(self, payload: bytes) -> bytes:
        """A worker's report: msgpack `WorkerLoad` in, msgpack `ReportReply` out, without an envelope.

        Raises:
            WireError: not a `WorkerLoad`.
        """
        return encode(self._router.report(decode(WorkerLoad, payload)))

    async def _admit(self, payload: bytes) -> bytes:
        return encode(await self._router.admit(decode(AdmitRequest, payload)))

    async def _prefill_done(self, payload: bytes) -> bytes:
        self._router.prefill_done(decode(RequestName, payload).request_id)
        return b""

    async def _redirect(self, payload: bytes) -> bytes:
        return encode(await self._router.redirect(decode(Redirect, payload)))

    async def _finish(self, payload: bytes) -> bytes:
        self._router.finish(decode(RequestName, payload).request_id)
        return b""

    async def _heartbeat(self, payload: bytes) -> bytes:
        return encode(self._router.heartbeat(decode(Heartbeat, payload)))

    async def _snapshot(self, _payload: bytes) -> bytes:
        return json.dumps(self._router.snapshot()).encode()

    async def _ready(self, _payload: bytes) -> bytes:
        return encode(self._router.ready())
