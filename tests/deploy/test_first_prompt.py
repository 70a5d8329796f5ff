"""The first prompt of a start, against a server that answers as the gateway does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.first_prompt import PROMPT, ask, curl_line
from deploy.local_cluster import StartFailed

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@contextmanager
def answering(choices: dict[str, dict[str, Any]], refusal: int = 400) -> Iterator[str]:
    """The URL of a server that streams one choice on each of these paths, and refuses others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert (body.get("prompt") or body["messages"][0]["content"]) == PROMPT
            if self.path not in choices:
                self._send(refusal, "no")
                return
            last = {"choices": [], "usage": {"completion_tokens": 2}, "timings": {"prefill_s": 0.5}}
            self._send(200, f"data: {json.dumps({'choices': [choices[self.path]]})}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n\n")

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("path", "choice"), [(CHAT, {"delta": {"content": "Paris"}}), (PLAIN, {"text": "Paris"})], ids=["chat", "without a chat template"]
)
def test_every_kind_of_model_answers(path: str, choice: dict[str, Any]) -> None:
    with answering({path: choice}) as url:
        answer = ask(url)
        assert (answer.text, answer.num_tokens, answer.timings) == ("Paris", 2, {"prefill_s": 0.5})
        assert curl_line(url, answer).startswith(f"curl {url}{path} ")
        assert PROMPT in curl_line(url, answer)


@pytest.mark.parametrize("status", [400, 503])
def test_no_answer_fails_the_start(status: int) -> None:
    with answering({}, status) as url, pytest.raises(StartFailed, match=f"HTTP {status}: no"):
        ask(url)
