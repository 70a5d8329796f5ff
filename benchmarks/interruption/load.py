"""The streams of one run: the same in every run, each on a connection of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from grpc import aio

from benchmarks.interruption.stop import EndedEarly
from benchmarks.interruption.timed_stream import TimedStream
from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub

_PROMPT: Final = "Once upon a time, in a lighthouse,"
_PROMPT_TOKENS: Final = 64  # more than the prompt has; the answers fill the rest of the context, since they must outlast the stop
_FIRST_TOKEN_S: Final = 120.0
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the gRPC API at `target`."""

    target: str
    model: pb.GetModelResponse
    num_streams: int

    @classmethod
    async def of(cls, target: str, num_streams: int) -> Load:
        """
        Raises:
            AioRpcError: nobody answers there.
        """
        async with aio.insecure_channel(target) as channel:
            stub: Any = InferenceStub(channel)
            return cls(target, await stub.GetModel(pb.GetModelRequest(), timeout=10), num_streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[list[TimedStream]]:
        """New streams, all of which have begun; they are cancelled at the end.

        Raises:
            TimeoutError: one does not begin.
            EndedEarly: one fails instead.
        """
        streams = [TimedStream() for _ in range(self.num_streams)]
        salt = secrets.token_hex(8)  # no run finds blocks of another in a prefix cache
        requests = [self._request(seed, f"{salt}-{seed}") for seed in range(self.num_streams)]
        tasks = [asyncio.create_task(stream.run(self.target, request)) for stream, request in zip(streams, requests, strict=True)]
        try:
            async with asyncio.timeout(_FIRST_TOKEN_S):
                await asyncio.gather(*(stream.begun.wait() for stream in streams))
            _check_alive(streams)
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _request(self, seed: int, cache_salt: str) -> pb.GenerateRequest:
        max_tokens = max(1, self.model.max_model_len - _PROMPT_TOKENS)
        return pb.GenerateRequest(
            model=self.model.name, text=_PROMPT, max_tokens=max_tokens, ignore_eos=True, seed=seed, cache_salt=cache_salt
        )


async def until_reached(streams: Sequence[TimedStream], num_tokens: Sequence[int], limit_s: float) -> None:
    """Returns when each stream has its number of tokens; streams that are as slow as that are left after `limit_s`.

    Raises:
        EndedEarly: a stream failed.
    """
    deadline_s = asyncio.get_running_loop().time() + limit_s
    while any(stream.num_tokens < number for stream, number in zip(streams, num_tokens, strict=True)):
        _check_alive(streams)
        if asyncio.get_running_loop().time() > deadline_s:
            return
        await asyncio.sleep(_LOOK_S)


def _check_alive(streams: Sequence[TimedStream]) -> None:
    failures = sorted(stream.failure for stream in streams if stream.failure is not None)
    if failures:
        raise EndedEarly(f"{len(failures)} of {len(streams)} streams failed though no process was stopped: {', '.join(failures)}")
