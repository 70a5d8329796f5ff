"""Who may enter the queue, and who must leave it unplaced.

A refusal here costs the client nothing but the refusal: no prompt has been computed. Bounds hold for new requests alone; one that is
submitted again was admitted before, and goes back to the place that its order key gives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cluster.errors import BatonError, DeadlineExceeded, InvalidRequest, NoCapacity, Overloaded
from cluster.types import AdmitRequest, WorkerLoad, WorkerRole
from router.control.dispatcher import Ticket
from router.control.drain_rate import DrainRate
from router.control.metrics import RouterMetrics
from router.control.order import OrderStamper
from router.control.pairing import limits_of
from router.control.queue import PriorityQueue, QueueItem


class Admission:
    """The queue's door."""

    def __init__(self, stamper: OrderStamper, queue: PriorityQueue[Ticket], drain: DrainRate, metrics: RouterMetrics) -> None:
        self._stamper = stamper
        self._queue = queue
        self._drain = drain
        self._metrics = metrics

    def check(self, request: AdmitRequest, pools: Mapping[WorkerRole, Sequence[WorkerLoad]]) -> None:
        """Raises:
        InvalidRequest: a count is not positive; names the field.
        DeadlineExceeded: nothing is left of its time.
        ContextTooLong: no worker of these running pools could hold it.
        """
        for name, count in (("prompt", request.num_prompt_tokens), ("max_tokens", request.max_tokens)):
            if count < 1:
                raise InvalidRequest(f"{name} must have at least one token, not {count}", param=name)
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise self.rejected(_deadline_passed(), "deadline")
        try:
            limits_of(pools).check(request)
        except BatonError as error:
            raise self.rejected(error, "context") from None

    def enqueue(self, request: AdmitRequest, now_s: float) -> QueueItem[Ticket]:
        """Stamps the request and puts it into the queue.

        Raises:
            Overloaded: see `Router.admit`.
        """
        order_key = request.order_key or self._stamper.stamp(request.priority, now_s - request.waited_s)
        item = QueueItem(
            request_id=request.request_id,
            order_key=order_key,
            num_tokens=request.num_prompt_tokens,
            class_name=self._stamper.class_name(request.priority),
            queued_at_s=now_s,
            payload=Ticket(request, _deadline_s(request, now_s), asyncio.get_running_loop().create_future()),
        )
        if request.order_key is None and not request.waited_s:
            self._check_bounds(item, now_s)
        self._queue.push(item)
        return item

    def overdue(
        self, item: QueueItem[Ticket], now_s: float, capacity_wait_s: float, no_capacity: str | None
    ) -> tuple[BatonError, str] | None:
        """The error that a queued request ends with now, and its reason for the metrics; None while it may wait."""
        ticket = item.payload
        if ticket.deadline_s is not None and now_s >= ticket.deadline_s:
            return _deadline_passed(), "deadline"
        if no_capacity is not None:
            return NoCapacity(no_capacity, retry_after_s=capacity_wait_s), "no_capacity"
        if ticket.no_worker_since_s is not None and now_s - ticket.no_worker_since_s >= capacity_wait_s:
            return NoCapacity("every worker that could serve this request has failed it", retry_after_s=capacity_wait_s), "no_capacity"
        return None

    def _check_bounds(self, item: QueueItem[Ticket], now_s: float) -> None:
        bound = self._queue.bound_reached(item.num_tokens)
        if bound is not None:
            retry_s = self._drain.retry_after_s(len(self._queue), now_s)
            held = f"{len(self._queue)} requests with {self._queue.num_tokens} prompt tokens"
            raise self.rejected(Overloaded(f"the queue is full: {held}", retry_after_s=retry_s), f"queue_{bound}")
        deadline_s = item.payload.deadline_s
        wait_s = self._drain.wait_s(self._queue.num_before(item.order_key), now_s)
        if deadline_s is not None and wait_s is not None and now_s + wait_s > deadline_s:
            message = f"the request would wait about {wait_s:.1f} s, longer than its deadline allows"
            raise self.rejected(Overloaded(message, retry_after_s=self._drain.retry_after_s(len(self._queue), now_s)), "hopeless")

    def rejected(self, error: BatonError, reason: str) -> BatonError:
        """Counts a refusal; the error, to be raised."""
        self._metrics.rejections.labels(reason).inc()
        return error


def _deadline_s(request: AdmitRequest, now_s: float) -> float | None:
    return None if request.timeout_s is None else now_s + request.timeout_s


def _deadline_passed() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed before a worker was free")
