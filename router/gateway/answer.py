"""A generation in the OpenAI API's shapes, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from router.gateway import responses as out
from router.gateway.formats import AnswerFormat
from router.gateway.generation import Generation


class Answer:
    """Reading it runs the request; it can be read once."""

    def __init__(self, generation: Generation, answer_format: AnswerFormat, *, includes_usage: bool, wants_timings: bool) -> None:
        self._generation = generation
        self._format = answer_format
        self._includes_usage = includes_usage
        self._wants_timings = wants_timings

    @property
    def outcome(self) -> str:
        """The finish reason, once there is one."""
        return self._generation.outcome

    async def whole(self) -> out.ChatCompletion | out.Completion:
        """
        Raises:
            BatonError: no answer.
        """
        deltas = await self._generation.whole()
        return self._format.whole(deltas, usage=self._usage(), **self._timings())

    async def events(self) -> AsyncGenerator[str, None]:
        """The JSON of each event, without the closing `[DONE]`.

        Raises:
            BatonError: no answer, or none to the end.
        """
        usage: dict[str, Any] = {"usage": None} if self._includes_usage else {}  # as the OpenAI API: null until the last
        is_first = True
        async with aclosing(self._generation.deltas()) as stream:
            async for delta in stream:
                is_last = delta.finish_reason is not None
                timings = self._timings() if is_last and not self._includes_usage else {}
                yield self._format.chunk(delta, is_first=is_first, **usage, **timings).to_json()
                is_first = False
        if self._includes_usage:
            yield self._format.tail(usage=self._usage(), **self._timings()).to_json()

    def _usage(self) -> out.Usage:
        generation = self._generation
        return out.Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=generation.num_output_tokens,
            total_tokens=generation.num_prompt_tokens + generation.num_output_tokens,
            prompt_tokens_details=out.PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
        )

    def _timings(self) -> dict[str, Any]:
        return {"timings": self._generation.timings()} if self._wants_timings else {}
