"""Baton's own gRPC API (`proto/inference.proto`): every message says its tokens, so none is dealt out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf import json_format
from grpc import aio

from benchmarks.load.answer import Answer, LoadError
from benchmarks.load.channels import Channels
from benchmarks.load.requests import LoadRequest
from cluster.errors import ConfigError
from cluster.pb import inference_pb2 as pb

_BATON_ERROR_KEY: Final = "baton-error-code"
_OWN_FIELDS: Final = {"model": "--model", "text": "--dataset", "token_ids": "--dataset", "prompt": "--dataset"}


def fields_of_body(body: Mapping[str, Any]) -> pb.GenerateRequest:
    """The fields of `--body` as the message has them; null is the default, a `stop` of one text a list of one.

    Raises:
        ConfigError: names a field that the message does not have, that the load itself sets, or whose value does not fit.
    """
    given = {name: [value] if name == "stop" and isinstance(value, str) else value for name, value in body.items()}
    for name, value in given.items():
        if name in _OWN_FIELDS:
            raise ConfigError(f"--body: {name}: is set by the load, see {_OWN_FIELDS[name]}", param="--body")
        if name not in pb.GenerateRequest.DESCRIPTOR.fields_by_name:
            raise ConfigError(f"--body: {name}: GenerateRequest of proto/inference.proto has no such field", param="--body")
        try:
            json_format.ParseDict({name: value}, pb.GenerateRequest())
        except json_format.ParseError as error:
            raise ConfigError(f"--body: {name}: {error}", param="--body") from error
    return json_format.ParseDict(given, pb.GenerateRequest())


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """Where and how to ask. `extra` goes into every request."""

    target: str  # host:port
    ignore_eos: bool = True
    timeout_s: float = 600.0  # of one request as a whole: the call's deadline
    extra: pb.GenerateRequest = field(default_factory=pb.GenerateRequest)


class GrpcTransport:
    """Calls `baton.v1.Inference`."""

    def __init__(self, target: GrpcTarget) -> None:
        self._target = target
        self._channels = Channels(target.target)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._channels.close()

    async def find_model(self) -> str:
        try:
            with self._channels.stub() as stub:
                model: pb.GetModelResponse = await stub.GetModel(pb.GetModelRequest(), timeout=self._target.timeout_s)
        except aio.AioRpcError as error:
            raise _as_load_error(error, has_begun=False) from error
        return model.name

    async def send(self, request: LoadRequest, model: str, answer: Answer) -> None:
        with self._channels.stub() as stub:
            call = stub.Generate(self._message(request, model), timeout=self._target.timeout_s)
            try:
                while (response := await call.read()) is not aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                    _read(response, time.perf_counter(), answer)
            except aio.AioRpcError as error:
                raise _as_load_error(error, has_begun=bool(await call.initial_metadata())) from error
        if answer.finished_s is None:
            raise LoadError("unfinished", "the stream ended without a finish reason")

    def _message(self, request: LoadRequest, model: str) -> pb.GenerateRequest:
        message = pb.GenerateRequest(model=model, max_tokens=request.max_tokens, temperature=0.0)
        if isinstance(request.prompt, str):
            message.text = request.prompt
        else:
            message.token_ids.ids.extend(request.prompt)
        if self._target.ignore_eos:
            message.ignore_eos = True
        message.MergeFrom(self._target.extra)
        return message


def _read(response: pb.GenerateResponse, now_s: float, answer: Answer) -> None:
    if response.text or response.tokens:
        answer.add_chunk(now_s, len(response.text), len(response.tokens))
    if response.finish_reason:
        answer.finish(now_s)
        answer.set_usage(response.usage.prompt_tokens, response.usage.completion_tokens)


def _as_load_error(error: aio.AioRpcError, *, has_begun: bool) -> LoadError:
    """UNAVAILABLE without Baton's own code is the connection's; it has no other status."""
    status, message = error.code(), error.details() or ""
    trailing: Any = error.trailing_metadata() or ()  # pairs, which the stubs do not say
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LoadError("timeout", "the answer was not whole in time")
    if status is grpc.StatusCode.UNAVAILABLE and _BATON_ERROR_KEY not in {key for key, _ in trailing}:
        return LoadError("dropped" if has_begun else "connect", message)
    return LoadError(f"grpc_{status.name}", message)
