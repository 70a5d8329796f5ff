"""The global queue: every request that was admitted and not yet placed, in the one order of promise P4.

A heap with lazy removal: a removed item stays in the heap as a husk until it surfaces, and the heap is rebuilt when husks are the
larger half, so that push, pop and removal cost O(log n) and memory stays within twice the live items.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from cluster.types import OrderKey

T = TypeVar("T")
Bound = Literal["requests", "tokens"]
_MIN_HUSKS: Final = 32


@dataclass(frozen=True, slots=True)
class QueueItem(Generic[T]):
    """One queued request. `payload` is the caller's."""

    request_id: str
    order_key: OrderKey
    num_tokens: int  # of the prompt
    class_name: str
    queued_at_s: float
    payload: T


@dataclass(frozen=True, slots=True)
class ClassGauge:
    """What one priority class has in the queue."""

    num_requests: int
    num_tokens: int
    oldest_wait_s: float


class PriorityQueue(Generic[T]):
    """Items by order key, smallest first; one a request id."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._items: dict[str, QueueItem[T]] = {}
        self._heap: list[tuple[OrderKey, str, int, QueueItem[T]]] = []
        self._num_pushed = 0  # tells an item from the husk of the same request, as items have no order of their own
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._items

    def __iter__(self) -> Iterator[QueueItem[T]]:
        """All items, in no order."""
        return iter(tuple(self._items.values()))

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def bound_reached(self, num_tokens: int) -> Bound | None:
        """Which bound forbids one more item of `num_tokens`. An empty queue takes any: else a long prompt never got in."""
        if len(self._items) >= self._max_requests:
            return "requests"
        if self._items and self._num_tokens + num_tokens > self._max_tokens:
            return "tokens"
        return None

    def push(self, item: QueueItem[T]) -> None:
        """Adds an item; asking `bound_reached` first is the caller's, as resubmitted requests go past the bounds."""
        assert item.request_id not in self._items, f"{item.request_id} is queued twice"
        self._items[item.request_id] = item
        self._num_tokens += item.num_tokens
        self._num_pushed += 1
        heapq.heappush(self._heap, (item.order_key, item.request_id, self._num_pushed, item))

    def get(self, request_id: str) -> QueueItem[T] | None:
        return self._items.get(request_id)

    def head(self) -> QueueItem[T] | None:
        """The first in order, left in the queue."""
        while self._heap and not self._is_live(self._heap[0][-1]):
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> QueueItem[T] | None:
        """Takes the first in order."""
        item = self.head()
        if item is not None:
            heapq.heappop(self._heap)
            self._forget(item)
        return item

    def remove(self, request_id: str) -> QueueItem[T] | None:
        """Takes an item from anywhere in the queue; None when it is not there."""
        item = self._items.get(request_id)
        if item is not None:
            self._forget(item)
            self._drop_husks()
        return item

    def num_before(self, order_key: OrderKey) -> int:
        """Items that go before a key; O(n)."""
        return sum(item.order_key < order_key for item in self._items.values())

    def by_class(self, class_names: Sequence[str], now_s: float) -> dict[str, ClassGauge]:
        """The queue's gauges, zeros for a class with nothing queued; O(n)."""
        groups: dict[str, list[QueueItem[T]]] = {name: [] for name in class_names}
        for item in self._items.values():
            groups.setdefault(item.class_name, []).append(item)
        return {name: _gauge(items, now_s) for name, items in groups.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError unless every item is in the heap once, in its place, and the tokens are those of the items."""
        live = [entry for entry in self._heap if self._is_live(entry[-1])]
        assert len(live) == len(self._items), f"{len(self._items)} items are queued, the heap has {len(live)} of them"
        assert all(entry[0] == entry[-1].order_key for entry in live), "an item is queued under another order key than its own"
        misplaced = [index for index in range(1, len(self._heap)) if self._heap[index] < self._heap[(index - 1) // 2]]
        assert not misplaced, "the queue is out of order"
        num_tokens = sum(item.num_tokens for item in self._items.values())
        assert self._num_tokens == num_tokens, f"the queue counts {self._num_tokens} tokens, its items have {num_tokens}"

    def _is_live(self, item: QueueItem[T]) -> bool:
        return self._items.get(item.request_id) is item

    def _forget(self, item: QueueItem[T]) -> None:
        del self._items[item.request_id]
        self._num_tokens -= item.num_tokens

    def _drop_husks(self) -> None:
        if len(self._heap) > 2 * len(self._items) + _MIN_HUSKS:
            self._heap = [(item.order_key, item.request_id, 0, item) for item in self._items.values()]
            heapq.heapify(self._heap)


def _gauge(items: Sequence[QueueItem[T]], now_s: float) -> ClassGauge:
    return ClassGauge(
        num_requests=len(items),
        num_tokens=sum(item.num_tokens for item in items),
        oldest_wait_s=max((now_s - item.queued_at_s for item in items), default=0.0),
    )
