"""How each kind of request is sent. A sender returns when the answer is whole, and raises `LoadError` for anything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from grpc import StatusCode, aio

from benchmarks.endurance.traffic import Kind, SoakRequest
from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.http import Api, HttpTarget, HttpTransport
from cluster import rpc
from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub

Send = Callable[[SoakRequest], Awaitable[None]]
TIMEOUT_S: Final = 300.0


@asynccontextmanager
async def senders(url: str, grpc_target: str | None) -> AsyncIterator[dict[Kind, Send]]:
    """A sender for each kind, on connections that are closed in the end.

    Raises:
        LoadError: the server does not say its model.
    """
    completions, chat = (HttpTransport(HttpTarget(url, api, timeout_s=TIMEOUT_S)) for api in _APIS)
    channel = aio.insecure_channel(grpc_target or "127.0.0.1:1")  # connects when it is first used
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with completions, chat, channel, aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        model = await completions.find_model()
        plain = _Plain(url, session, model)
        yield {
            "completions": _streaming(completions, model),
            "chat": _streaming(chat, model),
            "completions_whole": plain.completion,
            "chat_whole": plain.chat,
            "grpc": _Grpc(channel, model).generate,
            "bad": plain.mistake,
        }


_APIS: Final[tuple[Api, Api]] = ("completions", "chat")


def _streaming(transport: HttpTransport, model: str) -> Send:
    async def send(asked: SoakRequest) -> None:
        await transport.send(asked.request, model, Answer(time.perf_counter()))

    return send


class _Plain:
    """HTTP without a stream, on one session."""

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str) -> None:
        self._url, self._session, self._model = url, session, model

    async def completion(self, asked: SoakRequest) -> None:
        await self._ask("/v1/completions", {"prompt": asked.request.prompt}, asked)

    async def chat(self, asked: SoakRequest) -> None:
        await self._ask("/v1/chat/completions", {"messages": [{"role": "user", "content": asked.request.prompt}]}, asked)

    async def mistake(self, asked: SoakRequest) -> None:
        """Sends a request that must be refused.

        Raises:
            LoadError: `not_refused`, with what came instead.
        """
        right = {"model": self._model, "prompt": "a", "max_tokens": asked.request.max_tokens}
        mistakes: list[tuple[int, Any]] = [
            (400, {**right, "temperature": -1}),
            (400, {**right, "max_tokens": 10_000_000}),
            (400, {**right, "prompt": [2**31]}),
            (400, {**right, "n": 2 + asked.variant}),
            (404, {**right, "model": f"no-such-model-{asked.variant}"}),
            (400, "{no JSON"),
        ]
        status, body = mistakes[asked.variant % len(mistakes)]
        got, text = await self._post("/v1/completions", body)
        if got != status:
            raise LoadError("not_refused", f"expected {status} for {body}, got {got}: {text[:200]}")

    async def _ask(self, path: str, prompt: dict[str, Any], asked: SoakRequest) -> None:
        body = {"model": self._model, **prompt, "max_tokens": asked.request.max_tokens, "temperature": 1.0, "ignore_eos": True}
        status, text = await self._post(path, body)
        if status != 200:
            raise LoadError(f"http_{status}", text[:200])

    async def _post(self, path: str, body: Any) -> tuple[int, str]:
        content = {"data": body, "headers": {"content-type": "application/json"}} if isinstance(body, str) else {"json": body}
        try:
            async with self._session.post(self._url + path, **content) as response:
                return response.status, await response.text()
        except TimeoutError as error:
            raise LoadError("timeout", "the answer was not whole in time") from error
        except aiohttp.ClientConnectorError as error:
            raise LoadError("connect", str(error)) from error
        except aiohttp.ClientError as error:
            raise LoadError("dropped", f"{type(error).__name__}: {error}") from error


class _Grpc:
    """`baton.v1.Inference` on one channel."""

    def __init__(self, channel: aio.Channel, model: str) -> None:
        self._stub, self._model = InferenceStub(channel), model

    async def generate(self, asked: SoakRequest) -> None:
        ids = pb.TokenIds(ids=[token for token in asked.request.prompt if isinstance(token, int)])
        request = pb.GenerateRequest(model=self._model, token_ids=ids, max_tokens=asked.request.max_tokens, ignore_eos=True)
        finish_reason = pb.FINISH_REASON_UNSPECIFIED
        call = self._stub.Generate(request, timeout=TIMEOUT_S)
        try:
            while (message := await rpc.read(call)) is not None:
                finish_reason = message.finish_reason or finish_reason
        except asyncio.CancelledError:
            call.cancel()
            raise
        except aio.AioRpcError as error:
            kind = "timeout" if error.code() is StatusCode.DEADLINE_EXCEEDED else f"grpc_{error.code().name}"
            raise LoadError(kind, error.details() or "") from error
        if finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            raise LoadError("unfinished", "the stream ended without a finish reason")
