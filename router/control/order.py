"""The stamp of promise P4: a request's place in every queue of the cluster, fixed at admission.

`virtual_deadline_s = admission time + slack`, and the slack rises strictly with the integer priority. It is the slack of the
priority's class, moved by its level inside the class; the first class has no lower end, so its levels count down from its `up_to`:

        first class                 second class                third class
    ····-3 -2 -1 = up_to        0 = first level  1  2 ····      first level ····
    ◄── spread ──┤slack         slack├── spread ──►             slack├── spread ──►

`spread` is at most half of the smallest gap between two classes' slacks, so levels never reach into the next class. The slack is
bounded at both ends: a request is overtaken only by those admitted within `max_overtake_s` after it, whatever floods the queue.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from cluster.config import PriorityClass
from cluster.types import OrderKey

_MAX_LEVEL: Final = 2**32
_SINGLE_CLASS_SPREAD_S: Final = 1.0


class OrderStamper:
    """Makes order keys. `arrival` numbers rise with each stamp, so equal deadlines keep their order of arrival."""

    def __init__(self, classes: Sequence[PriorityClass]) -> None:
        self._classes = tuple(classes)
        self._bounds = [c.up_to for c in classes]
        gaps = [later.slack_s - earlier.slack_s for earlier, later in pairwise(classes)]
        self._spread_s = min(gaps) / 2 if gaps else _SINGLE_CLASS_SPREAD_S
        self._arrivals = 0

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self._classes)

    @property
    def max_overtake_s(self) -> float:
        """A request admitted this much later than another never goes before it."""
        return self._classes[-1].slack_s - self._classes[0].slack_s + 2 * self._spread_s

    def class_name(self, priority: int) -> str:
        """The class that holds `priority`; beyond the last bound, the last."""
        return self._classes[self._index(priority)].name

    def slack_s(self, priority: int) -> float:
        """Strictly rising in `priority`, up to the resolution of a float."""
        index = self._index(priority)
        slack_s = self._classes[index].slack_s
        if index == 0:
            return slack_s - self._spread_s * _level_share(self._bounds[0] - priority)
        return slack_s + self._spread_s * _level_share(priority - self._bounds[index - 1] - 1)

    def stamp(self, priority: int, now_s: float) -> OrderKey:
        """The key of a request admitted now."""
        self._arrivals += 1
        return OrderKey(now_s + self.slack_s(priority), self._arrivals)

    def _index(self, priority: int) -> int:
        return min(bisect_left(self._bounds, priority), len(self._bounds) - 1)


def _level_share(level: int) -> float:
    """Of a class's spread: 0 at its edge, 1 at the last level. Logarithmic, so that near levels, the common ones, differ most."""
    return math.log1p(min(max(level, 0), _MAX_LEVEL)) / math.log1p(_MAX_LEVEL)


def anchored_clock() -> Callable[[], float]:
    """A clock in seconds that never steps back and reads like the wall clock of its start.

    Order keys outlive the router that stamped them, and a plain monotonic clock has another zero on another node.
    """
    offset_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset_s
