"""An OpenAI server over HTTP: completions (text or token ids) or chat, streamed, with the usage at the end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

import aiohttp

from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.requests import LoadRequest
from deploy.sse import event_data

Api = Literal["completions", "chat"]
_PATHS: Final = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_TEXT_KEYS: Final = ("content", "reasoning_content", "reasoning")  # of a chat's delta


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where and how to ask. `url` is the server's root; `/v1` and a full endpoint are understood too."""

    url: str
    api: Api = "completions"
    ignore_eos: bool = True
    timeout_s: float = 600.0  # of one request as a whole
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1")


class HttpTransport:
    """One `aiohttp` session; connections are kept and their number has no bound."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s),
            headers={"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else None,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session:
            await self._session.close()

    async def find_model(self) -> str:
        try:
            async with self._open_session.get(f"{self._target.root}/v1/models") as response:
                await _check_status(response)
                listed = await response.json()
            return str(listed["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _as_load_error(error) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LoadError("malformed", "/v1/models lists no model") from error

    async def send(self, request: LoadRequest, model: str, answer: Answer) -> None:
        url = self._target.root + _PATHS[self._target.api]
        try:
            async with self._open_session.post(url, json=self._body(request, model)) as response:
                await _check_status(response)
                await self._read(response.content, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _as_load_error(error) from error
        if answer.finished_s is None:
            raise LoadError("unfinished", "the stream ended without a finish reason")

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session, "the transport is used inside its async context"
        return self._session

    def _body(self, request: LoadRequest, model: str) -> dict[str, Any]:
        chat = self._target.api == "chat"
        asked = {"messages": [{"role": "user", "content": request.prompt}]} if chat else {"prompt": request.prompt}
        return {
            "model": model,
            **asked,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            **({"ignore_eos": True} if self._target.ignore_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._target.extra_body,
        }

    async def _read(self, content: aiohttp.StreamReader, answer: Answer) -> None:
        """The time is taken once a read, before anything is parsed: events that came together arrived together."""
        buffered, now_s = b"", time.perf_counter()
        async for received in content.iter_any():
            now_s = time.perf_counter()
            *lines, buffered = (buffered + received).split(b"\n")
            for line in lines:
                _read_line(line, now_s, answer)
        _read_line(buffered, now_s, answer)  # some servers end without a newline


def _read_line(line: bytes, now_s: float, answer: Answer) -> None:
    if data := event_data(line):
        _read_event(data, now_s, answer)


def _read_event(data: bytes, now_s: float, answer: Answer) -> None:
    try:
        event = json.loads(data)
        if "error" in event:
            raise LoadError("error_event", _message(event["error"]))
        for choice in event.get("choices") or ():
            num_chars = _num_chars(choice)
            if num_chars:
                answer.add_chunk(now_s, num_chars)
            if choice.get("finish_reason"):
                answer.finish(now_s)
        if usage := event.get("usage"):
            answer.set_usage(usage["prompt_tokens"], usage["completion_tokens"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadError("malformed", f"no event of a stream: {data[:200]!r}") from error


def _num_chars(choice: dict[str, Any]) -> int:
    if "text" in choice:
        return len(choice["text"] or "")
    delta = choice.get("delta") or {}
    return sum(len(delta.get(key) or "") for key in _TEXT_KEYS)


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.text()
    try:
        message = _message(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        message = body[:200]
    raise LoadError(f"http_{response.status}", message)


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


def _as_load_error(error: Exception) -> LoadError:
    if isinstance(error, TimeoutError):
        return LoadError("timeout", "the answer was not whole in time")
    if isinstance(error, aiohttp.ClientConnectorError):
        return LoadError("connect", str(error))
    return LoadError("dropped", f"{type(error).__name__}: {error}")
