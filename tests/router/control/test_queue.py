"""The queue against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.config import RouterConfig
from router.control.order import OrderStamper
from router.control.queue import ClassGauge, PriorityQueue, QueueItem
from tests.router.control.builders import key


def item(name: str, deadline_s: float, arrival: int = 0, num_tokens: int = 1, class_name: str = "normal") -> QueueItem[None]:
    return QueueItem(name, key(deadline_s, arrival), num_tokens, class_name, queued_at_s=0.0, payload=None)


def test_a_request_may_take_the_place_of_its_removed_self() -> None:
    """As an admit does that is sent again with its order key, while the first is still held."""
    queue: PriorityQueue[object] = PriorityQueue(max_requests=4, max_tokens=4)
    first, again = (QueueItem("r", key(1.0), 1, "normal", queued_at_s, object()) for queued_at_s in (0.0, 1.0))
    queue.push(first)
    queue.remove("r")
    queue.push(again)
    assert queue.pop() is again
    assert queue.pop() is None


class QueueAgainstSortedList(RuleBasedStateMachine):
    """Any mix of pushes, pops and removals leaves what a sorted list would have."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: PriorityQueue[None] = PriorityQueue(max_requests=20, max_tokens=200)
        self.model: dict[str, QueueItem[None]] = {}
        self.num_made = 0

    @rule(deadline_s=st.integers(0, 5), num_tokens=st.integers(1, 60))
    def push(self, deadline_s: int, num_tokens: int) -> None:
        self.num_made += 1
        new = item(f"r{self.num_made}", deadline_s, self.num_made, num_tokens)
        held = sum(each.num_tokens for each in self.model.values())
        expected = "requests" if len(self.model) >= 20 else "tokens" if self.model and held + num_tokens > 200 else None
        assert self.queue.bound_reached(num_tokens) == expected
        if expected is None:
            self.queue.push(new)
            self.model[new.request_id] = new

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        first = min(self.model.values(), key=lambda each: each.order_key)
        assert self.queue.pop() is first
        del self.model[first.request_id]

    @rule(number=st.integers(1, 40))
    def remove(self, number: int) -> None:
        name = f"r{number}"
        assert self.queue.remove(name) is self.model.pop(name, None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_and_push_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        taken = self.queue.remove(name)
        assert taken is not None
        self.queue.push(taken)

    @invariant()
    def books_agree(self) -> None:
        assert len(self.queue) == len(self.model)
        assert self.queue.num_tokens == sum(each.num_tokens for each in self.model.values())
        assert self.queue.head() is min(self.model.values(), key=lambda each: each.order_key, default=None)
        assert {each.request_id for each in self.queue} == set(self.model)

    def teardown(self) -> None:
        drained = [each.request_id for each in iter(self.queue.pop, None)]
        assert drained == [each.request_id for each in sorted(self.model.values(), key=lambda each: each.order_key)]


TestQueueAgainstSortedList = QueueAgainstSortedList.TestCase


def test_husks_do_not_pile_up() -> None:
    queue: PriorityQueue[None] = PriorityQueue(max_requests=10, max_tokens=10**9)
    queue.push(item("stays", 0.0))
    for number in range(10_000):
        queue.push(item(f"r{number}", 1.0, number))
        queue.remove(f"r{number}")
    assert len(queue._heap) < 100


def test_a_prompt_beyond_the_token_bound_enters_an_empty_queue_only() -> None:
    queue: PriorityQueue[None] = PriorityQueue(max_requests=10, max_tokens=100)
    assert queue.bound_reached(1000) is None
    queue.push(item("long", 0.0, num_tokens=1000))
    assert queue.bound_reached(1) == "tokens"


def test_gauges_by_class() -> None:
    queue: PriorityQueue[None] = PriorityQueue(max_requests=10, max_tokens=100)
    for name, tokens, class_name in (("a", 3, "high"), ("b", 4, "low"), ("c", 5, "low")):
        queue.push(item(name, 0.0, num_tokens=tokens, class_name=class_name))
    assert queue.by_class(("high", "normal", "low"), now_s=7.0) == {
        "high": ClassGauge(1, 3, 7.0),
        "normal": ClassGauge(0, 0, 0.0),
        "low": ClassGauge(2, 9, 7.0),
    }
    assert queue.num_before(key(0.0, 1)) == 3


@given(st.lists(st.integers(-50, -1), min_size=1, max_size=200), st.integers(1, 100))
def test_the_lowest_class_waits_no_longer_than_the_bound_under_a_flood(flood: list[int], low: int) -> None:
    """One request is served a second and one of the highest class arrives a second, for ever: the low one still gets its turn."""
    stamper = OrderStamper(RouterConfig().classes)
    queue: PriorityQueue[None] = PriorityQueue(max_requests=10**6, max_tokens=10**6)
    queue.push(QueueItem("low", stamper.stamp(low, 0.0), 1, "low", 0.0, None))
    for second in range(1, 200):
        queue.push(QueueItem(f"r{second}", stamper.stamp(flood[second % len(flood)], float(second)), 1, "high", float(second), None))
        served = queue.pop()
        if served is not None and served.request_id == "low":
            assert second <= stamper.max_overtake_s + 1
            return
    raise AssertionError("the low request starved")
