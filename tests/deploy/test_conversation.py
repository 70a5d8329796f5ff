"""A chat's history and figures, over HTTP with a scripted server."""

from __future__ import annotations

import pytest

from deploy.conversation import Conversation, Reply
from deploy.openai_client import OpenAIServer, ServerError
from tests.conftest import free_port
from tests.deploy.scripted_server import Script, scripted_server


def ignore(_text: str) -> None:
    """Shows nothing."""


def test_each_question_carries_what_was_said() -> None:
    shown: list[str] = []
    with scripted_server(Script(("Par", "is.")), Script(("Rome.",)), Script(("Yes.",))) as server:
        conversation = Conversation(OpenAIServer(server.url), "m", {"temperature": 0.0, "seed": 7}, system="Be brief.")
        assert conversation.ask("France?", shown.append).text == "Paris."
        conversation.ask("Italy?", ignore)
        conversation.reset()
        conversation.system = None
        conversation.ask("Again?", ignore)
    assert shown == ["Par", "is."]
    first, second, third = ([(m["role"], m["content"]) for m in body["messages"]] for body in server.bodies)
    assert first == [("system", "Be brief."), ("user", "France?")]
    assert second == [*first, ("assistant", "Paris."), ("user", "Italy?")]
    assert third == [("user", "Again?")]
    assert server.bodies[0].items() >= {"model": "m", "temperature": 0.0, "seed": 7, "stream": True}.items()
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("wanted", [True, False])
def test_timings_are_asked_for_and_shown(wanted: bool) -> None:
    timings = {"queue_s": 0.001, "prefill_s": 0.25, "transfer_s": 0.004, "ttft_s": 0.3}
    with scripted_server(Script(("a", "b", "c"), timings=timings)) as server:
        reply = Conversation(OpenAIServer(server.url), "m", {}, timings=wanted).ask("?", ignore)
    assert (server.headers[0].get("x-baton-timings") == "1") is wanted
    assert "3 tokens" in reply.summary()
    assert reply.summary().endswith("queue 1 ms, prefill 250 ms, transfer 4 ms")


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        (Reply(text="ab", first_s=0.5, last_s=2.5, num_tokens=11), "first token 0.50 s · 11 tokens · 5.0/s"),
        (Reply(text="ab", first_s=0.5, last_s=1.5, num_chunks=3), "first token 0.50 s · 3 chunks · 2.0/s"),
        (Reply(text="a", first_s=0.5, last_s=0.5, num_tokens=1), "first token 0.50 s · 1 token"),
        (Reply(num_tokens=0), "0 tokens"),
        (
            Reply(text="ab", first_s=1.0, last_s=2.0, num_tokens=2, finish_reason="length"),
            "first token 1.00 s · 2 tokens · 1.0/s · cut at the limit of tokens",
        ),
        (
            Reply(text="a", first_s=1.0, last_s=1.0, num_chunks=1, is_cancelled=True),
            "first token 1.00 s · 1 chunk · cancelled; what came stays in the history",
        ),
    ],
)
def test_summary(reply: Reply, summary: str) -> None:
    assert reply.summary() == summary


@pytest.mark.parametrize(
    ("script", "said", "status"),
    [
        (
            Script(status=429, error={"message": "the queue is full"}, headers={"Retry-After": "2"}),
            "HTTP 429: the queue is full (try again in 2 s)",
            429,
        ),
        (Script(status=400, error={"message": "300 tokens are over 256"}), "HTTP 400: 300 tokens are over 256", 400),
        (Script(status=503, error={"message": "no\nworker"}), "HTTP 503: no worker", 503),
        (
            Script(status=400, error={"message": "Cannot use chat template functions"}),
            "HTTP 400: Cannot use chat template functions; a model without a chat template answers at /v1/completions",
            400,
        ),
        (Script(("a",), error={"message": "the worker died"}), "the answer failed: the worker died", None),
        (Script(("a",), finish_reason=None), "the answer broke off: the stream ended without a finish reason", None),
    ],
)
def test_what_fails_is_one_line_and_leaves_the_history(script: Script, said: str, status: int | None) -> None:
    with scripted_server(script, Script(("fine",))) as server:
        conversation = Conversation(OpenAIServer(server.url), "m", {})
        with pytest.raises(ServerError) as caught:
            conversation.ask("one", ignore)
        assert (str(caught.value), caught.value.status) == (said, status)
        assert conversation.ask("two", ignore).text == "fine"
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["two"]


def test_no_server() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match=f"cannot connect to {url}: Connection refused"):
        Conversation(OpenAIServer(url), "m", {}).ask("?", ignore)


def test_an_interrupted_answer_closes_its_connection_and_stays() -> None:
    def interrupt(_text: str) -> None:
        raise KeyboardInterrupt

    with scripted_server(Script(("half",), stalls=True), Script(("fine",))) as server:
        conversation = Conversation(OpenAIServer(server.url), "m", {})
        reply = conversation.ask("one", interrupt)
        assert reply.is_cancelled
        assert server.left.wait(10), "the server hears of it"
        conversation.ask("two", ignore)
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["one", "half", "two"]
