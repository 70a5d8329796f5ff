"""A peer that serves, a script in the place of its Python: it is waited for, asked, and gone afterwards, or tells why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.comparison.failure import PeerError
from benchmarks.comparison.servers import vllm
from deploy.openai_client import OpenAIServer
from deploy.process_tree import descendants
from tests.benchmarks.comparison.fake_vllm import install_fake_vllm
from tests.conftest import free_port

_SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": sys.argv[sys.argv.index("--served-model-name") + 1]}]}).encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_it_serves_and_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = install_fake_vllm(tmp_path, monkeypatch, _SERVER)
    before = descendants()
    with vllm(model, 1, "float32", free_port())() as url:
        assert OpenAIServer(url).first_model() == "some-model"
        assert len(descendants() - before) == 1
    assert descendants() == before


def test_one_that_ends_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = install_fake_vllm(tmp_path, monkeypatch, "print('loading'); raise SystemExit('RuntimeError: no AVX-512')")
    with pytest.raises(PeerError, match="it did not start: RuntimeError: no AVX-512"), vllm(model, 1, "float32", free_port())():
        pass


def test_one_that_is_not_there_tells_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    with pytest.raises(PeerError, match="--install vllm"), vllm(tmp_path, 1, "float32", free_port())():
        pass
