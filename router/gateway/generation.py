"""A checked request's text, read either whole or delta by delta, with the accounts that every protocol tells its client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from router.gateway.job import Job
from router.gateway.run import RequestRun
from router.gateway.text_stream import TextDelta, TextStream


class Generation:
    """Reading it runs the request; it can be read once."""

    def __init__(self, job: Job, run: RequestRun, stream: TextStream) -> None:
        """`stream` is the text of `run`, which is a run of `job`."""
        self._run = run
        self._stream = stream
        self.request_id = job.request_id
        self.num_prompt_tokens = len(job.prompt_token_ids)
        self.num_logprobs = job.sampling.num_logprobs
        self.outcome = ""  # the finish reason, once there is one

    @property
    def num_output_tokens(self) -> int:
        """So far."""
        return self._stream.num_output_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, as prefill saw it: to the decode worker all of the prompt comes from a cache."""
        return self._run.num_cached_tokens

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """
        Raises:
            BatonError: no answer, or none to the end.
        """
        async with aclosing(self._stream.deltas()) as stream:
            async for delta in stream:
                if delta.finish_reason is not None:
                    self.outcome = str(delta.finish_reason)
                yield delta

    async def whole(self) -> list[TextDelta]:
        """
        Raises:
            BatonError: no answer.
        """
        async with aclosing(self.deltas()) as stream:
            return [delta async for delta in stream]

    def timings(self) -> dict[str, float]:
        """Seconds by stage, so far."""
        stages = asdict(self._run.timings)
        extra: dict[str, float] = stages.pop("extra")
        return {name: round(seconds, 6) for name, seconds in {**stages, **extra}.items()}
