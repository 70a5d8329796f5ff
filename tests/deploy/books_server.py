"""A server that tells prepared books, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from cluster.books import ClusterBooks


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[str]:
    """The URL of a server that gives `answers` in turn, the last one for ever."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name is the library's
            status, body = left.pop(0) if len(left) > 1 else left[0]
            if self.path != "/v1/cluster/books":
                status, body = 404, "no such path"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def telling(*books: ClusterBooks) -> list[tuple[int, str]]:
    """Answers for `answering`."""
    return [(200, json.dumps(asdict(each))) for each in books]
