"""A chat with a model: the messages so far, and one streamed answer at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from deploy.openai_client import CHAT_PATH, OpenAIServer, ServerError

_STAGES: Final = {"queue": "queue_s", "prefill": "prefill_s", "transfer": "transfer_s"}


@dataclass(slots=True)
class Reply:
    """One answer, as it comes. Times are seconds since the question was sent."""

    started_s: float = field(default_factory=time.monotonic)
    text: str = ""
    finish_reason: str | None = None
    is_cancelled: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    first_s: float = 0.0
    last_s: float = 0.0
    num_chunks: int = 0
    num_tokens: int | None = None  # the server's count

    def add(self, event: Mapping[str, Any]) -> str:
        """Takes one event; the text that it brings."""
        come = ""
        for choice in event.get("choices") or ():
            come += (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if come:
            self.last_s = time.monotonic() - self.started_s
            self.first_s = self.first_s or self.last_s
            self.num_chunks += 1
            self.text += come
        self.timings = event.get("timings") or self.timings
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)
        return come

    def summary(self) -> str:
        """Where the time went, in one line."""
        return " · ".join(self._figures())

    def _figures(self) -> Iterator[str]:
        if self.text:
            yield f"first token {self.first_s:.2f} s"
        num_tokens = self.num_chunks if self.num_tokens is None else self.num_tokens
        yield f"{num_tokens} {'chunk' if self.num_tokens is None else 'token'}{'' if num_tokens == 1 else 's'}"
        if num_tokens > 1 and self.last_s > self.first_s:
            yield f"{(num_tokens - 1) / (self.last_s - self.first_s):.1f}/s"
        stages = [f"{name} {self.timings[key] * 1e3:.0f} ms" for name, key in _STAGES.items() if key in self.timings]
        if stages:
            yield ", ".join(stages)
        if self.finish_reason == "length":
            yield "cut at the limit of tokens"
        if self.is_cancelled:
            yield "cancelled" + ("; what came stays in the history" if self.text else "")


class Conversation:
    """What was said, on one server with one model."""

    def __init__(
        self, server: OpenAIServer, model: str, fields: Mapping[str, Any], *, system: str | None = None, timings: bool = True
    ) -> None:
        """
        Args:
            fields: added to every body, as `temperature`.
            system: the system message.
            timings: ask for the time in each stage.
        """
        self._server = server
        self._model = model
        self._fields = dict(fields)
        self._timings = timings
        self._turns: list[dict[str, str]] = []
        self.system = system

    def reset(self) -> None:
        """Forgets what was said; the system message stays."""
        self._turns.clear()

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """All that is sent with `prompt`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns, {"role": "user", "content": prompt}]

    def ask(self, prompt: str, on_text: Callable[[str], None]) -> Reply:
        """Streams the answer to `on_text`. A KeyboardInterrupt ends it: the connection is closed, and what came counts as the answer.

        Raises:
            ServerError: there is no answer, or a part only; neither it nor the prompt stays in the history.
        """
        reply = Reply()
        try:
            with closing(self._server.events(CHAT_PATH, self._body(prompt), timings=self._timings)) as events:  # type: ignore[type-var]
                for event in events:
                    if come := reply.add(event):
                        on_text(come)
        except KeyboardInterrupt:
            reply.is_cancelled = True
        except ServerError as error:
            raise _with_advice(error) from error
        if not reply.is_cancelled and reply.finish_reason is None:
            raise ServerError("the answer broke off: the stream ended without a finish reason")
        if reply.text:
            self._turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply.text}]
        return reply

    def _body(self, prompt: str) -> dict[str, Any]:
        asked = {"model": self._model, "messages": self.messages(prompt), **self._fields}
        return {**asked, "stream": True, "stream_options": {"include_usage": True}}


def _with_advice(error: ServerError) -> ServerError:
    message = str(error)
    if error.status == 400 and "chat template" in message and "/v1/completions" not in message:
        return ServerError(f"{message}; a model without a chat template answers at /v1/completions", error.status)
    return error
