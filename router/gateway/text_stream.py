"""One run's tokens as text: detokenized, cut at a stop string, with what logprobs need to know of each token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cluster.errors import InternalError
from cluster.types import FinishReason, TokenOutput
from router.gateway.detokenizer import Detokenizer
from router.gateway.run import RequestRun, TokenChunk
from router.gateway.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextToken:
    """A generated token and where its text begins, in characters from the start of the answer."""

    output: TokenOutput
    text_offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next part of the answer. Only the last may have no text; it alone has a finish reason."""

    text: str
    tokens: tuple[TextToken, ...]  # since the delta before; a token whose text is held back comes with the delta that brings it
    finish_reason: FinishReason | None = None


class TextStream:
    """Reads a run to its end. A stop string ends the run early, which frees what the workers hold for it."""

    def __init__(self, run: RequestRun, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int = 0) -> None:
        """
        Args:
            min_tokens: stop strings count only in the text of the tokens after these.
        """
        self._run = run
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._pending: list[TextToken] = []
        self._num_chars = 0
        self.num_output_tokens = 0

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """
        Raises:
            BatonError: the run failed.
        """
        async with aclosing(self._run.tokens()) as chunks:
            async for chunk in chunks:
                delta = self._delta(chunk)
                if delta.finish_reason is not None:
                    self._run.complete()
                if delta.text or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    return

    def _delta(self, chunk: TokenChunk) -> TextDelta:
        if chunk.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise InternalError(f"the worker ended the request early: {chunk.finish_reason}")
        text = ""
        for index, output in enumerate(chunk.outputs):
            is_last = chunk.finish_reason is not None and index == len(chunk.outputs) - 1
            # The token that stops a sequence (EOS, a stop id) is no part of its text.
            text += self._push(output, is_silent=is_last and chunk.finish_reason is FinishReason.STOP)
            if self._stops.matched is not None:
                return self._take(text, FinishReason.STOP)
        if chunk.finish_reason is None:
            return self._take(text, None)
        text += self._stops.push(self._detokenizer.flush())
        reason = FinishReason.STOP if self._stops.matched is not None else chunk.finish_reason
        return self._take(text + self._stops.flush(), reason)

    def _push(self, output: TokenOutput, *, is_silent: bool) -> str:
        self.num_output_tokens += 1
        self._pending.append(TextToken(output, self._num_chars))
        text = "" if is_silent else self._detokenizer.push(output.token_id)
        self._num_chars += len(text)
        return text if self.num_output_tokens <= self._min_tokens else self._stops.push(text)

    def _take(self, text: str, finish_reason: FinishReason | None) -> TextDelta:
        if not text and finish_reason is None:
            return TextDelta("", ())
        tokens, self._pending = tuple(self._pending), []
        return TextDelta(text, tokens, finish_reason)
