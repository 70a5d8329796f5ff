"""What the commands take for a URL, and the reader of events."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError
from deploy.openai_client import OpenAIServer, ServerError
from deploy.sse import event_data
from tests.deploy.scripted_server import Script, scripted_server


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions", "http://h:1/v1/completions"],
)
def test_all_forms_of_a_url_are_its_root(url: str) -> None:
    assert OpenAIServer(url).url == "http://h:1"


def test_a_prefix_stays() -> None:
    assert OpenAIServer("https://h/model/v1").url == "https://h/model"


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://h:0"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        OpenAIServer(url)


@pytest.mark.parametrize(
    ("line", "data"),
    [(b"data: {}\n", b"{}"), (b"data:{}\r\n", b"{}"), (b"data: [DONE]\n", None), (b": ping\n", None), (b"\n", None), (b"event: x\n", None)],
)
def test_event_data(line: bytes, data: bytes | None) -> None:
    assert event_data(line) == data


def test_a_server_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-tests")
    with scripted_server(Script(("a",))) as server:
        list(OpenAIServer(server.url).events("/v1/chat/completions", {}))
        assert server.headers[0]["authorization"] == "Bearer sk-tests"
        server.get["/v1/models"] = (200, {"data": []})
        with pytest.raises(ServerError, match="lists no model"):
            OpenAIServer(server.url).first_model()
        server.get["/v1/models"] = (401, {"detail": "no"})
        with pytest.raises(ServerError, match=r"HTTP 401: .*detail"):
            OpenAIServer(server.url).first_model()
