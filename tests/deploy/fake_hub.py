"""A hub on loopback that answers as Hugging Face's does where `huggingface_hub` asks: one model's files, and what it was asked for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote, urlsplit

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`files` are those of `repository`, in every revision of `revisions`."""

    repository: str
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gguf_architecture: str | None = None
    token: str | None = None  # gated: files only with it
    cut_after: dict[str, int] = field(default_factory=dict)  # one answer of this file breaks off after so many bytes
    broken_after_cut: bool = False  # and then the hub fails
    stall_in: str | None = None  # this file's answer stops in its middle
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)  # "METHOD path", and " Range" where one was asked for
    url: str = ""
    is_broken: bool = False

    def info(self) -> dict[str, Any]:
        """The answer of `/api/models/…`."""
        siblings = [{"rfilename": name, "size": len(content), "blobId": _etag(content)} for name, content in self.files.items()]
        gguf = {"gguf": {"architecture": self.gguf_architecture}} if self.gguf_architecture else {}
        return {"id": self.repository, "sha": COMMIT, "siblings": siblings, **gguf}

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        return {line.split()[1].rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line}


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}{' Range' if self.headers['range'] else ''}")
        if hub.is_broken:
            self._send(500, b"")
        elif path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
        else:
            repository, _, rest = path.removeprefix("/").partition("/resolve/")
            self._file(repository, rest.partition("/")[2])

    def _info(self, path: str) -> None:
        repository, _, revision = path.partition("/revision/")
        if repository != self.hub.repository:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision and revision not in (*self.hub.revisions, COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._send(200, json.dumps(self.hub.info()).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, name: str) -> None:
        hub = self.hub
        if hub.token is not None and self.headers["authorization"] != f"Bearer {hub.token}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif repository != hub.repository or name not in hub.files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            self._content(name)

    def _content(self, name: str) -> None:
        content = self.hub.files[name]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}
        start = int((self.headers["range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.hub.cut_after.pop(name, None) if self.command == "GET" else None
        if self.command == "GET" and name == self.hub.stall_in:
            self._stall(content, headers)
            return
        if cut is not None:
            self.hub.is_broken = self.hub.broken_after_cut
        self._send(206 if start else 200, content[start:], headers, cut)

    def _stall(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.hub.stalled.set()
        self.hub.closing.wait(60)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Answers, at `hub.url`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield hub
        finally:
            hub.closing.set()
            server.shutdown()
            thread.join()
