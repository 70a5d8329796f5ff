"""A checked request's answer, read either whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from cluster.errors import BatonError, NoCapacity
from router.gateway import responses as out
from router.gateway.formats import AnswerFormat
from router.gateway.run import RequestRun
from router.gateway.text_stream import TextDelta, TextStream

Begin = Callable[[BatonError | None], tuple[RequestRun, TextStream]]


class Answer:
    """Reading it runs the request; it can be read once."""

    def __init__(
        self,
        begin: Begin,
        answer_format: AnswerFormat,
        *,
        num_prompt_tokens: int,
        includes_usage: bool,
        wants_timings: bool,
    ) -> None:
        """`begin` makes a run of the request and its text; again, with the error, when a run has failed."""
        self._begin = begin
        self._run, self._stream = begin(None)
        self._format = answer_format
        self._num_prompt_tokens = num_prompt_tokens
        self._includes_usage = includes_usage
        self._wants_timings = wants_timings
        self.outcome = ""  # the finish reason, once there is one

    async def whole(self) -> out.ChatCompletion | out.Completion:
        """Nothing is sent before the end, so workers that fail after the first token cost one more run, not the answer.

        Raises:
            BatonError: no answer.
        """
        try:
            deltas = await self._deltas()
        except NoCapacity as error:
            if self._stream.num_output_tokens == 0:
                raise  # the run itself has tried what there is to try
            self._run, self._stream = self._begin(error)
            deltas = await self._deltas()
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

    async def _deltas(self) -> list[TextDelta]:
        async with aclosing(self._stream.deltas()) as stream:
            return [delta async for delta in stream]

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
