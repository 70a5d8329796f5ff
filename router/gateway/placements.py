"""The placements this gateway holds, and the calls to the router that concern them.

Every request that was submitted is finished exactly once, whatever became of it. `finish` does not wait: the call goes out from a task of
the book, outside the request's context, so neither a cancelled request nor a slow router can skip or delay it. What gets lost is put
right by a later heartbeat, which lists all placements that are live: the router ends those of this gateway that it does not list, and
learns those that it has forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from dataclasses import replace
from typing import Any, Final

from cluster.errors import BatonError, StaleEpoch
from cluster.types import AdmitRequest, Placement
from router.control.client import RouterClient
from router.control.messages import LiveRequest, Phase, Redirect

_LOG = logging.getLogger(__name__)
_CALL_TIMEOUT_S: Final = 10.0


class PlacementBook:
    """One gateway's live placements."""

    def __init__(self, router: RouterClient, gateway_id: str) -> None:
        self._router = router
        self.gateway_id = gateway_id
        self._admitting: set[str] = set()
        self._live: dict[str, LiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def live_ids(self) -> tuple[str, ...]:
        """Requests with a placement."""
        return tuple(self._live)

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests that wait for a placement or have one."""
        return frozenset(self._admitting | self._live.keys())

    @property
    def num_calls(self) -> int:
        """Calls to the router that nobody waits for and that have not ended."""
        return len(self._tasks)

    async def admit(self, request: AdmitRequest) -> Placement:
        """Waits in the router's queue for a placement.

        Raises:
            BatonError: as the router's `admit`.
        """
        self._admitting.add(request.request_id)
        try:
            placement = await self._router.admit(request)
        finally:
            self._admitting.discard(request.request_id)
        self._live[request.request_id] = LiveRequest(request, placement, Phase.PREFILL)
        return placement

    async def redirect(self, redirect: Redirect) -> Placement:
        """Another decode worker for KV that waits at its prefill worker.

        Raises:
            BatonError: as the router's `redirect`.
        """
        try:
            placement = await self._router.redirect(redirect)
        except StaleEpoch:  # a new life of the router does not know the request yet
            await self.heartbeat()
            placement = await self._router.redirect(redirect)
        if (entry := self._live.get(redirect.request_id)) is not None:
            self._live[redirect.request_id] = replace(entry, placement=placement)
        return placement

    def prefill_done(self, request_id: str) -> None:
        """The prefill worker's part is over: its blocks are free."""
        if (entry := self._live.get(request_id)) is not None:
            self._live[request_id] = replace(entry, phase=Phase.DECODE)
            self._spawn(self._router.prefill_done(request_id))

    def finish(self, request_id: str) -> None:
        """Ends the request at the router, placed or still queued. Idempotent there."""
        self._live.pop(request_id, None)
        self._spawn(self._router.finish(request_id))

    async def heartbeat(self) -> None:
        """Tells the router what is live here.

        Raises:
            BatonError: the router cannot be reached.
        """
        await self._router.heartbeat(self.gateway_id, tuple(self._live.values()))

    async def heartbeat_forever(self, interval_s: float) -> None:
        """Beats until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await self.heartbeat()
            except (BatonError, TimeoutError) as error:
                _LOG.warning("no heartbeat reached the router: %s", str(error) or type(error).__name__)
            await asyncio.sleep(interval_s)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every placement is of this gateway, and of the request that it is kept for."""
        for request_id, entry in self._live.items():
            names = {entry.request.request_id, entry.placement.request_id}
            assert names == {request_id}, f"the placement of {request_id} names {sorted(names)}"
            assert entry.request.gateway_id == self.gateway_id, f"the placement of {request_id} is of {entry.request.gateway_id}"

    async def settle(self) -> None:
        """Waits for the calls that are under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        # Serve cancels a request together with the calls in its context: when its client leaves, the very call that tells so.
        task = asyncio.create_task(self._settled(call), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _settled(call: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await call
        except (BatonError, TimeoutError) as error:
            _LOG.warning("the router missed the end of a placement, the next heartbeat tells it: %s", str(error) or type(error).__name__)
