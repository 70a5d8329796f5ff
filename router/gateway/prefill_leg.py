"""The open stream of one prompt's prefill. One task reads it to its end: until the KV is taken, its failure is the KV's."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from cluster.errors import InternalError
from cluster.pb import worker_pb2 as pb
from router.gateway.legs import Legs
from router.gateway.timeline import Timeline
from router.gateway.worker_clients import WorkerStream

T = TypeVar("T")


class PrefillLeg:
    """Offer and first token can be waited for by several tasks, and more than once."""

    def __init__(self, stream: WorkerStream[pb.PrefillEvent], legs: Legs, timeline: Timeline) -> None:
        """`legs` ends the reading with the attempt."""
        loop = asyncio.get_running_loop()
        self._stream = stream
        self._timeline = timeline
        self._offer: asyncio.Future[pb.KVOffer] = loop.create_future()
        self._first_token: asyncio.Future[pb.FirstToken] = loop.create_future()
        self.end = legs.spawn(self._read())  # done: the stream is over; its exception says how it failed

    @property
    def ticket(self) -> bytes:
        """The latest form of the ticket: as offered, or complete. Only after the offer."""
        return self._first_token.result().ticket if self._first_token.done() else self._offer.result().ticket

    @property
    def has_failed(self) -> bool:
        """Its end alone is no failure: a decode worker that died may have taken the KV first."""
        return self.end.done() and not self.end.cancelled() and self.end.exception() is not None

    async def offer(self) -> pb.KVOffer:
        """
        Raises:
            BatonError: the stream failed before.
        """
        return await self._before_the_end(self._offer)

    async def first_token(self) -> pb.FirstToken:
        """
        Raises:
            BatonError: the stream failed before.
        """
        return await self._before_the_end(self._first_token)

    async def settle(self, timeout_s: float) -> None:
        """Waits for the first token or the end of the stream, not longer than `timeout_s`."""
        await asyncio.wait((self._first_token, self.end), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _before_the_end(self, future: asyncio.Future[T]) -> T:
        await asyncio.wait((future, self.end), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            self.end.result()
            raise InternalError("the prefill worker ended its stream too early")
        return future.result()

    async def _read(self) -> None:
        while (event := await self._stream.read()) is not None:
            match event.WhichOneof("event"):
                case "offer" if not self._offer.done():
                    self._offer.set_result(event.offer)
                case "first_token" if self._offer.done() and not self._first_token.done():
                    # Here, and not where it is waited for: a decode worker may have the KV before the loop comes round to that.
                    self._timeline.prefilled(self._offer.result().wait_s, event.first_token.prefill_s)
                    self._first_token.set_result(event.first_token)
                case "ready" if self._offer.done():
                    pass  # for whoever reads the blocks, and that is not us
                case kind:
                    raise InternalError(f"the prefill worker sent {kind} out of turn")
