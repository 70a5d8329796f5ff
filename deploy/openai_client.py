"""An OpenAI server as the commands ask it: one connection a call, on the calling thread, so that an exception such as Ctrl-C ends both."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

from cluster.errors import ConfigError
from deploy.sse import event_data

DEFAULT_URL: Final = "http://127.0.0.1:8000"  # of a server that this machine serves
CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
_SHOWN_CHARS: Final = 300  # of a body that is no OpenAI error


class ServerError(Exception):
    """No answer, or no whole one. `status` is None when there was no HTTP status to tell it; the message is one line."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OpenAIServer:
    """`url` is the server's root; `HOST:PORT`, `/v1` and a full endpoint are understood too. `OPENAI_API_KEY` is sent where it is set."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        """
        Args:
            timeout_s: the longest silence.

        Raises:
            ConfigError: not an HTTP URL.
        """
        self.url = (
            (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1")
        )
        self._parts = urlsplit(self.url)
        try:
            is_wrong = self._parts.scheme not in ("http", "https") or not self._parts.hostname or self._parts.port == 0
        except ValueError:  # of the port
            is_wrong = True
        if is_wrong:
            raise ConfigError(f"URL: expected http://HOST:PORT or https://HOST:PORT (got {url!r})", param="url")
        self._timeout_s = timeout_s

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of one GET.

        Raises:
            ServerError: there is no response.
        """
        with self._connected() as connection:
            connection.request("GET", self._parts.path + path, headers=_headers())
            with connection.getresponse() as response:
                return response.status, response.read().decode(errors="replace")

    def get_json(self, path: str) -> Any:
        """The JSON that a GET brings.

        Raises:
            ServerError: there is no response, or another status than 200.
        """
        status, body = self.get(path)
        if status != 200:
            raise ServerError(f"HTTP {status}: {_message(body)}", status)
        try:
            return json.loads(body)
        except ValueError as error:
            raise ServerError(f"{self.url}{path} does not answer with JSON") from error

    def first_model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
            ServerError: it lists none.
        """
        try:
            return str(self.get_json("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models lists no model") from error

    def events(self, path: str, body: Mapping[str, Any], *, timings: bool = False) -> Iterator[dict[str, Any]]:
        """The events of one streamed answer. Close the iterator to end the request: that closes the connection.

        Args:
            timings: ask a Baton for the time in each stage.

        Raises:
            ServerError: a status other than 200, an error event, or a connection that breaks.
        """
        with self._connected() as connection:
            headers = {"content-type": "application/json", **_headers(), **({"x-baton-timings": "1"} if timings else {})}
            connection.request("POST", self._parts.path + path, json.dumps(body), headers)
            with connection.getresponse() as response:  # which may have taken the socket over from the connection
                if response.status != 200:
                    raise _refusal(response)
                for line in response:
                    if data := event_data(line):
                        yield _event(data)

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        with closing(connection):
            try:
                connection.connect()
            except OSError as error:
                raise ServerError(f"cannot connect to {self.url}: {error.strerror or error}") from error
            try:
                yield connection
            except TimeoutError as error:
                raise ServerError(f"{self.url} said nothing for {self._timeout_s:.0f} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the connection to {self.url} broke: {str(error) or type(error).__name__}") from error


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def _refusal(response: http.client.HTTPResponse) -> ServerError:
    message = f"HTTP {response.status}: {_message(response.read().decode(errors='replace'))}"
    if retry_after := response.headers.get("retry-after"):
        message += f" (try again in {retry_after} s)"
    return ServerError(message, response.status)


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"no event of an OpenAI stream: {data[:_SHOWN_CHARS].decode(errors='replace')}")
    if "error" in event:
        raise ServerError(f"the answer failed: {_said(event['error'])}")
    return event


def _message(body: str) -> str:
    """The OpenAI error's message, or the body as it is."""
    try:
        return _said(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return " ".join(body[:_SHOWN_CHARS].split())


def _said(error: Any) -> str:
    return " ".join(str(error.get("message") or error if isinstance(error, dict) else error).split())
