"""A small `baton.v1.Inference` with scripted answers, which keeps what it was asked and by which connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from cluster import rpc
from cluster.errors import BatonError
from cluster.pb import inference_pb2 as pb
from cluster.pb import inference_pb2_grpc


@dataclass(frozen=True)
class Script:
    """One answer: `messages` are (delay before it, text, number of tokens), the last with the finish reason; then `failure`."""

    messages: Sequence[tuple[float, str, int]] = ((0.0, "ab", 1), (0.0, "cd", 3))
    is_finished: bool = True
    failure: BatonError | grpc.StatusCode | None = None


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers with `scripts` in turn, the last one for ever."""

    def __init__(self, *scripts: Script) -> None:
        self.seen: list[pb.GenerateRequest] = []
        self.peers: list[str] = []
        self.num_cancelled = 0
        self._scripts = scripts or (Script(),)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802  # as the gateway's
        script = self._scripts[min(len(self.seen), len(self._scripts) - 1)]
        self.seen.append(request)
        self.peers.append(context.peer())
        try:
            await self._answer(script, context)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _answer(self, script: Script, context: Any) -> None:
        await context.send_initial_metadata((("baton-request-id", "cmpl-1"),))
        for index, (delay_s, text, num_tokens) in enumerate(script.messages):
            await asyncio.sleep(delay_s)
            message = pb.GenerateResponse(text=text, tokens=[pb.Token(token_id=7)] * num_tokens)
            if script.is_finished and index == len(script.messages) - 1:
                message.finish_reason = pb.FINISH_REASON_LENGTH
                message.usage.CopyFrom(pb.Usage(prompt_tokens=5, completion_tokens=sum(count for _, _, count in script.messages)))
            await context.write(message)
        if isinstance(script.failure, BatonError):
            await rpc.abort(context, script.failure)
        elif script.failure is not None:
            await context.abort(script.failure, "said by the server")

    async def Abort(self, _request: pb.AbortRequest, _context: Any) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse()

    async def GetModel(self, _request: pb.GetModelRequest, _context: Any) -> pb.GetModelResponse:  # noqa: N802
        return pb.GetModelResponse(name="tiny")


@asynccontextmanager
async def serving(fake: FakeInference) -> AsyncIterator[str]:
    """Its `host:port`."""
    server = aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
