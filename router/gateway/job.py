"""One checked request, as the gateway runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster.errors import DeadlineExceeded
from cluster.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """Times are `time.monotonic()` of this process."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    started_s: float  # when it arrived
    deadline_s: float
    priority: int = 0
    cache_salt: str = ""

    def remaining_s(self) -> float:
        """What is left of the deadline.

        Raises:
            DeadlineExceeded: nothing.
        """
        remaining_s = self.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        return remaining_s
