"""One real prompt over HTTP, to show that a start ended well, and where its time went."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deploy.local_cluster import StartFailed
from deploy.openai_client import CHAT_PATH, COMPLETIONS_PATH, OpenAIServer, ServerError

PROMPT: Final = "What is the capital of France?"
_READY_TIMEOUT_S: Final = 60.0
_ANSWER_TIMEOUT_S: Final = 120.0
_GREEDY: Final = {"temperature": 0, "max_tokens": 48}
_POLL_S: Final = 0.1
_QUESTIONS: Final[Mapping[str, dict[str, Any]]] = {
    CHAT_PATH: {"messages": [{"role": "user", "content": PROMPT}]},
    COMPLETIONS_PATH: {"prompt": PROMPT},  # for models without a chat template
}
_FIRST_TOKEN_STAGES: Final = {"gateway": "gateway_s", "queue": "queue_s", "prefill wait": "prefill_wait_s", "prefill": "prefill_s"}
_HANDOFF_STAGES: Final = {"transfer": "transfer_s", "decode wait": "decode_wait_s"}  # after the first token is out


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The answer and its times: those that the response reports, and those seen here."""

    model: str
    path: str  # the endpoint that gave it
    text: str
    timings: dict[str, float]
    ttft_s: float
    total_s: float
    num_tokens: int

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each line of the table."""
        stages_s = {name: self.timings.get(key, 0.0) for name, key in _FIRST_TOKEN_STAGES.items()}
        yield from ((name, _ms(seconds)) for name, seconds in stages_s.items())
        yield "HTTP", _ms(self.ttft_s - sum(stages_s.values()))  # proxy, connection and hops: what no stage explains
        yield "= first token", _ms(self.ttft_s)
        yield from ((name, _ms(self.timings.get(key, 0.0))) for name, key in _HANDOFF_STAGES.items())
        if self.num_tokens > 1:
            yield "per token", _ms((self.total_s - self.ttft_s) / (self.num_tokens - 1))
        yield "tokens", str(self.num_tokens)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def await_ready(url: str) -> None:
    """Returns when new requests can be served.

    Raises:
        StartFailed: when that takes too long; the message is the gateway's reason.
    """
    server, deadline_s = OpenAIServer(url, _ANSWER_TIMEOUT_S), time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            server.get_json("/ready")
            return
        except ServerError as error:
            if time.monotonic() > deadline_s:
                raise StartFailed(f"not ready after {_READY_TIMEOUT_S:.0f} s: {error}") from error
        time.sleep(_POLL_S)


def ask(url: str) -> FirstAnswer:
    """Streams the answer to `PROMPT`.

    Raises:
        StartFailed: when there is none.
    """
    server = OpenAIServer(url, _ANSWER_TIMEOUT_S)
    try:
        model = server.first_model()
        try:
            return _ask(server, model, CHAT_PATH)
        except ServerError as error:
            if error.status != 400:
                raise
            return _ask(server, model, COMPLETIONS_PATH)
    except ServerError as error:
        raise StartFailed(f"the first prompt failed: {error}") from error


def _ask(server: OpenAIServer, model: str, path: str) -> FirstAnswer:
    start_s = time.monotonic()
    texts: list[str] = []
    timings: dict[str, float] = {}
    ttft_s, num_tokens = 0.0, 0
    for event in server.events(path, _body(model, path), timings=True):
        for choice in event["choices"]:
            text = choice.get("delta", {}).get("content") or choice.get("text") or ""
            if text and not texts:
                ttft_s = time.monotonic() - start_s
            texts.append(text)
        timings = event.get("timings") or timings
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    return FirstAnswer(model, path, "".join(texts), timings, ttft_s, time.monotonic() - start_s, num_tokens)


def curl_line(url: str, answer: FirstAnswer) -> str:
    """A command that asks the same, to paste into a shell."""
    body = json.dumps({"model": answer.model, **_QUESTIONS[answer.path], **_GREEDY})
    return f"curl {url}{answer.path} -H 'content-type: application/json' -d '{body}'"


def _body(model: str, path: str) -> dict[str, Any]:
    return {
        "model": model,
        **_QUESTIONS[path],
        **_GREEDY,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
