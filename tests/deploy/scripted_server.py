"""An OpenAI server on loopback that answers each chat request by the next of its scripts, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """One answer: a refusal, or `texts` and what comes after them."""

    texts: tuple[str, ...] = ()
    status: int = 200
    error: dict[str, Any] | None = None  # the body of a refusal, or the event after the texts
    headers: dict[str, str] = field(default_factory=dict)
    finish_reason: str | None = "stop"  # None: the stream ends without one
    timings: dict[str, float] | None = None
    stalls: bool = False  # after the texts, until the client leaves


@dataclass
class ScriptedServer:
    """`get` is the JSON of paths for GET, `(status, JSON)`."""

    scripts: deque[Script] = field(default_factory=deque)
    get: dict[str, tuple[int, Any]] = field(default_factory=lambda: {"/v1/models": (200, {"data": [{"id": "scripted"}]})})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)  # the client of a stalled answer closed its connection
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    scripted: ScriptedServer

    def do_GET(self) -> None:
        status, content = self.scripted.get.get(self.path, (404, {"error": {"message": f"GET {self.path}: not found"}}))
        self._send(status, json.dumps(content))

    def do_POST(self) -> None:
        self.scripted.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.scripted.headers.append({name.lower(): value for name, value in self.headers.items()})
        script = self.scripted.scripts.popleft()
        if script.status != 200:
            self._send(script.status, json.dumps({"error": script.error}), script.headers)
            return
        self._send(200, "")
        for text in script.texts:
            self._event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        if script.stalls:
            self.scripted.stalled.set()
            if self.connection.recv(1) == b"":
                self.scripted.left.set()
        elif script.error is not None:
            self._event({"error": script.error})
        else:
            self._end(script)

    def _end(self, script: Script) -> None:
        if script.finish_reason is not None:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.finish_reason}]})
        usage = {"prompt_tokens": 3, "completion_tokens": len(script.texts)}
        self._event({"choices": [], "usage": usage, **({"timings": script.timings} if script.timings else {})})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f": a comment\n\ndata: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def scripted_server(*scripts: Script) -> Iterator[ScriptedServer]:
    """Answers, at `url`."""
    scripted = ScriptedServer(deque(scripts))
    handler = type("Handler", (_Handler,), {"scripted": scripted})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        scripted.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield scripted
        finally:
            server.shutdown()
            thread.join()
