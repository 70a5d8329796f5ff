"""Between the two legs: finds a decode worker that takes the KV which waits at the prefill worker.

It may begin when the blocks are offered, and not all computed yet. The prefill stream stays open meanwhile, for closing it frees the
blocks. It is watched: when it fails, the KV is gone and so is the attempt. A decode worker that has no room declines, and one that cannot
be reached or refuses has not touched the ticket; either way the router names another worker for the same ticket.
"""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.errors import DeadlineExceeded, NoCapacity, StaleEpoch, TransferError, WrongIncarnation
from cluster.pb import worker_pb2 as pb
from cluster.types import Placement, Request, WorkerAddress
from router.control.messages import Redirect
from router.gateway.job import Job
from router.gateway.legs import AttemptFailed, Legs, expect
from router.gateway.metrics import GatewayMetrics
from router.gateway.placements import PlacementBook
from router.gateway.prefill_leg import PrefillLeg
from router.gateway.timeline import Timeline
from router.gateway.worker_clients import WorkerClients, WorkerStream

DecodeStream = WorkerStream[pb.DecodeEvent]
HandedOver = tuple[DecodeStream, WorkerAddress]

_SETTLE_S: Final = 0.25


class Handoff:
    """One request's. Workers that decline may do so until the deadline; workers that fail, `max_failures` times in all."""

    def __init__(
        self, job: Job, book: PlacementBook, workers: WorkerClients, metrics: GatewayMetrics, timeline: Timeline, *, max_failures: int
    ) -> None:
        self._job = job
        self._book = book
        self._workers = workers
        self._metrics = metrics
        self._timeline = timeline
        self._max_failures = max_failures

    async def run(self, placement: Placement, request: Request, prefill: PrefillLeg, legs: Legs) -> HandedOver:
        """The decode worker that has taken the KV, and its stream after `KVTaken`.

        Raises:
            AttemptFailed: the KV is lost, or too many decode workers failed.
            BatonError: no decode worker is left, or the deadline passed.
        """
        assert placement.prefill is not None, "its stream is what brought the ticket"
        prefill_worker = placement.prefill
        num_failures = 0
        while True:
            stream = legs.open(self._ask(placement, request, prefill.ticket))
            try:
                event = await legs.linked(stream.read(), prefill.end)
            except NoCapacity as error:
                # What went wrong with the KV itself no other worker can mend.
                num_failures += 1
                if isinstance(error, TransferError):
                    await prefill.settle(_SETTLE_S)  # the cause may be its end, well or not, which we hear of by another way
                if isinstance(error, TransferError) or prefill.end.done() or num_failures >= self._max_failures:
                    raise AttemptFailed(error, prefill_worker if prefill.has_failed else placement.decode) from error
                reason, retry_after_s, is_gone = error.code, 0.0, _is_gone(error)
            else:
                if event is not None and event.WhichOneof("event") == "taken":
                    self._timeline.kv_taken(event.taken)
                    self._book.prefill_done(self._job.request_id)
                    return stream, placement.decode
                reason, retry_after_s, is_gone = "declined", expect(event, "declined").declined.retry_after_s, False
            stream.cancel()
            self._metrics.retries.labels(reason).inc()
            redirect = Redirect(self._job.request_id, placement.decode.incarnation, retry_after_s, is_gone)
            try:
                placement = await legs.linked(self._redirect(redirect), prefill.end)
            except NoCapacity as error:
                # A placement ends with any of its workers, also while it waits for the life that follows: that is no reason to give up.
                if prefill.has_failed or isinstance(error, StaleEpoch):
                    raise AttemptFailed(error, prefill_worker) from error
                raise

    def _ask(self, placement: Placement, request: Request, ticket: bytes) -> DecodeStream:
        self._timeline.decode_asked()
        return self._workers.decode(placement.decode, placement.router_epoch, request, self._job.remaining_s(), ticket=ticket)

    async def _redirect(self, redirect: Redirect) -> Placement:
        try:
            async with asyncio.timeout(self._job.remaining_s()):
                return await self._book.redirect(redirect)
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline passed while no decode worker had room") from error


def _is_gone(error: NoCapacity) -> bool:
    """Nobody answers at its address, or another life of it does. Any other refusal was its own word."""
    return type(error) is NoCapacity or isinstance(error, WrongIncarnation)
