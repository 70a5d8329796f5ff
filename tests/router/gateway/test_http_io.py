"""Bodies of clients that leave while they send."""

from __future__ import annotations

import pytest
from ray.exceptions import TaskCancelledError
from starlette.requests import Request
from starlette.types import Message

from cluster.errors import BodyTooLarge, ClientGone
from router.gateway.http_io import read_body

pytestmark = pytest.mark.asyncio


def request_of(*messages: Message | Exception) -> Request:
    received = iter(messages)

    async def receive() -> Message:
        message = next(received)
        if isinstance(message, Exception):
            raise message
        return message

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


PART: Message = {"type": "http.request", "body": b"abc", "more_body": True}


@pytest.mark.parametrize(
    "end",
    [
        pytest.param({"type": "http.disconnect"}, id="told by the server"),
        pytest.param(TaskCancelledError(), id="raised by Serve's own receive"),  # what it asks the proxy with is cancelled with the request
    ],
)
async def test_a_client_that_leaves_while_sending_is_gone(end: Message | Exception) -> None:
    with pytest.raises(ClientGone):
        await read_body(request_of(PART, end), limit_bytes=100)


async def test_a_body_in_parts() -> None:
    assert await read_body(request_of(PART, {"type": "http.request", "body": b"d"}), limit_bytes=4) == b"abcd"


async def test_a_body_over_the_limit() -> None:
    with pytest.raises(BodyTooLarge, match="4 bytes"):
        await read_body(request_of(PART, PART), limit_bytes=4)
