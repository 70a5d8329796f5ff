"""Collects where one request's time goes (promise P5).

    TTFT         = gateway + queue + prefill wait + prefill
    second token = first token + handoff + transfer + decode wait + first step

The gateway measures the left sides and its own stages on its own clock; workers report durations of theirs. Handoff is the gateway's too:
until the first token is written to its reader and a decode worker asked; none, where the decode worker was asked at the offer. What a
decode worker did before the first token is hidden behind the prefill, and so in no stage: transfer is the exposed part of it. What is not
explained (hops between processes) is reported, as is time lost to failed attempts and to decode workers that declined. What is lost
after the first token is in `recompute_s`, from a worker's failure to the next token; until the second token it is also part of the
handoff.
"""

from __future__ import annotations

import time

from cluster.pb import worker_pb2 as pb
from cluster.types import StageTimings
from router.gateway.metrics import GatewayMetrics


class Timeline:
    """One request's times, from its arrival on. All marks are `time.monotonic()`."""

    def __init__(self, started_s: float, metrics: GatewayMetrics) -> None:
        self._started_s = started_s
        self._metrics = metrics
        self._attempt_s = time.monotonic()
        self._gateway_s = self._attempt_s - started_s
        self._failed_attempts_s = 0.0
        self._recompute_s = 0.0
        self._failed_s: float | None = None  # after the first token, until the next one comes
        self._queue_s = 0.0
        self._router_queue_s = 0.0
        self._prefill_wait_s = 0.0
        self._prefill_s = 0.0
        self._transfer_s = 0.0
        self._decode_wait_s = 0.0
        self._handoff_s = 0.0
        self._handoff_from_s: float | None = None
        self._declined_s = 0.0
        self._first_step_s = 0.0
        self._decode_asked_s: float | None = None
        self._prefilled_s = 0.0  # of this attempt; 0: not yet
        self._first_token_s: float | None = None
        self._second_token_s: float | None = None
        self._last_token_s: float | None = None

    def attempt_failed(self) -> None:
        """The next attempt starts now."""
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._failed_attempts_s += now_s - self._attempt_s
        else:
            self._failed_s = now_s if self._failed_s is None else self._failed_s
            self._hand_over(now_s)
        self._decode_asked_s = None
        self._prefilled_s = 0.0
        self._attempt_s = now_s

    def placed(self, router_queue_s: float) -> None:
        """The router answered; `router_queue_s` is its own account of the wait."""
        if self._first_token_s is None:
            self._queue_s = time.monotonic() - self._attempt_s
            self._router_queue_s = router_queue_s

    def prefilled(self, wait_s: float, prefill_s: float) -> None:
        """A worker's account of the prompt."""
        self._prefilled_s = time.monotonic()
        if self._first_token_s is None:
            self._prefill_wait_s = wait_s
            self._prefill_s = prefill_s
        else:
            self._hand_over(self._prefilled_s)

    def decode_asked(self) -> None:
        """A decode worker is asked; again after a refusal."""
        now_s = time.monotonic()
        if self._decode_asked_s is None:
            self._hand_over(now_s)
        elif self._prefilled_s and self._second_token_s is None:
            self._declined_s += now_s - max(self._decode_asked_s, self._prefilled_s)
        self._decode_asked_s = now_s

    def kv_taken(self, event: pb.KVTaken) -> None:
        """The KV is at the decode worker."""
        if self._second_token_s is None:
            assert self._decode_asked_s is not None, "who asked?"
            hidden_s = max(0.0, self._prefilled_s - self._decode_asked_s)
            self._transfer_s = event.transfer_s
            self._decode_wait_s = max(0.0, event.wait_s - hidden_s)

    def tokens(self, num_tokens: int, decode_wait_s: float = 0.0, step_s: float = 0.0) -> None:
        """Tokens arrived; the durations are the decode worker's, with its first ones after the KV."""
        now_s = time.monotonic()
        if self._second_token_s is None:
            self._decode_wait_s += decode_wait_s
            self._first_step_s += step_s
        if self._failed_s is not None:
            self._recompute_s += now_s - self._failed_s
            self._failed_s = None
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s = self._handoff_from_s = now_s
            self._metrics.ttft.observe(now_s - self._started_s)
            num_tokens -= 1
        elif self._second_token_s is None:
            self._second_token_s = now_s
        gap_s = now_s - (self._last_token_s or now_s)
        for _ in range(num_tokens):
            self._metrics.itl.observe(gap_s / num_tokens)
        self._last_token_s = now_s

    def finished(self) -> None:
        """The request has all its tokens."""
        if self._last_token_s is not None:
            self._metrics.e2e.observe(self._last_token_s - self._started_s)
        self._metrics.observe_stages(self.timings())

    def _hand_over(self, now_s: float) -> None:
        """Between the first two tokens: all since the last call, or the first token, is the handoff's; what is known of stages is of a
        failed attempt, or still to come."""
        if self._handoff_from_s is None or self._second_token_s is not None:
            return
        self._handoff_s += now_s - self._handoff_from_s
        self._handoff_from_s = now_s
        self._declined_s = self._transfer_s = self._decode_wait_s = self._first_step_s = 0.0

    def timings(self) -> StageTimings:
        """The stages so far; `extra` holds the measured sums, what they leave unexplained, and losses."""
        extra = {
            "router_queue_s": self._router_queue_s,
            "failed_attempts_s": self._failed_attempts_s,
            "recompute_s": self._recompute_s,
            "handoff_s": self._handoff_s,
            "declined_s": self._declined_s,
        }
        if self._first_token_s is not None and self._last_token_s is not None:
            ttft_s = self._first_token_s - self._started_s
            stages_s = self._gateway_s + self._failed_attempts_s + self._queue_s + self._prefill_wait_s + self._prefill_s
            extra |= {"ttft_s": ttft_s, "ttft_unexplained_s": ttft_s - stages_s, "e2e_s": self._last_token_s - self._started_s}
            if self._second_token_s is not None:
                second_s = self._second_token_s - self._first_token_s
                stages_s = self._handoff_s + self._declined_s + self._transfer_s + self._decode_wait_s + self._first_step_s
                extra |= {"second_token_s": second_s, "second_token_unexplained_s": second_s - stages_s}
                extra["exposed_transfer_s"] = second_s - self._first_step_s
        return StageTimings(
            gateway_s=self._gateway_s,
            queue_s=self._queue_s,
            prefill_wait_s=self._prefill_wait_s,
            prefill_s=self._prefill_s,
            transfer_s=self._transfer_s,
            decode_wait_s=self._decode_wait_s,
            first_step_s=self._first_step_s,
            extra=extra,
        )
