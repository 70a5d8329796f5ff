"""A checked request's answer, read either whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from router.gateway import responses as out
from router.gateway.formats import AnswerFormat
from router.gateway.run import RequestRun
from router.gateway.text_stream import TextStream


class Answer:
    """Reading it runs the request; it can be read once."""

    def __init__(
        self,
        run: RequestRun,
        stream: TextStream,
        answer_format: AnswerFormat,
        *,
        num_prompt_tokens: int,
        includes_usage: bool,
        wants_timings: bool,
    ) -> None:
        self._run = run
        self._stream = stream
        self._format = answer_format
        self._num_prompt_tokens = num_prompt_tokens
        self._includes_usage = includes_usage
        self._wants_timings = wants_timings
        self.outcome = ""  # the finish reason, once there is one

    async def whole(self) -> out.ChatCompletion | out.Completion:
        """
        Raises:
            BatonError: no answer.
        """
        async with aclosing(self._stream.deltas()) as stream:
            deltas = [delta async for delta in stream]
        self.outcome = str(deltas[-1].finish_reason)
        return self._format.whole(deltas, usage=self._usage(), **self._timings())

    async def events(self) -> AsyncGenerator[str, None]:
        """The JSON of each event, without the closing `[DONE]`.

        Raises:
            BatonError: no answer, or none to the end.
        """
        usage: dict[str, Any] = {"usage": None} if self._includes_usage else {}  # as the OpenAI API: null until the last
        is_first = True
        async with aclosing(self._stream.deltas()) as stream:
            async for delta in stream:
                is_last = delta.finish_reason is not None
                self.outcome = str(delta.finish_reason) if is_last else ""
                timings = self._timings() if is_last and not self._includes_usage else {}
                yield self._format.chunk(delta, is_first=is_first, **usage, **timings).to_json()
                is_first = False
        if self._includes_usage:
            yield self._format.tail(usage=self._usage(), **self._timings()).to_json()

    def _usage(self) -> out.Usage:
        num_output_tokens = self._stream.num_output_tokens
        return out.Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=self._num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=out.PromptTokensDetails(cached_tokens=self._run.num_cached_tokens),
        )

    def _timings(self) -> dict[str, Any]:
        if not self._wants_timings:
            return {}
        timings = asdict(self._run.timings)
        extra: dict[str, float] = timings.pop("extra")
        return {"timings": {name: round(seconds, 6) for name, seconds in {**timings, **extra}.items()}}
