"""Baton over gRPC with asyncio: `python -m deploy.examples.grpc_client_asyncio "The capital of France is"`.

Leaving the loop early, or cancelling the task, cancels the call; the cluster then frees all that it holds for it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from grpc import aio

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub
from deploy.examples.grpc_client import OPTIONS, PATIENCE_S, TIMEOUT_S, positive, say_waiting


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the text as it comes."""
    parser = argparse.ArgumentParser(description="Complete a text over gRPC, with asyncio.")
    parser.add_argument("prompt")
    parser.add_argument("--target", default="127.0.0.1:9000", help="host:port of the gateway (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=32)
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_complete(options.target, options.prompt, options.max_tokens))
    except aio.AioRpcError as error:
        raise SystemExit(f"{error.code().name}: {error.details()}") from error


def retrying_channel(target: str) -> aio.Channel:
    """A channel that outlives a gateway: see `grpc_client.RETRIES`."""
    return aio.insecure_channel(target, options=OPTIONS)


async def _await_ready(channel: aio.Channel, target: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await channel.channel_ready()
    except TimeoutError:
        say_waiting(target)


async def _complete(target: str, prompt: str, max_tokens: int) -> None:
    async with retrying_channel(target) as channel:
        await _await_ready(channel, target)
        stub = InferenceStub(channel)
        model = await stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT_S)
        request = pb.GenerateRequest(model=model.name, text=prompt, max_tokens=max_tokens, temperature=0.0)
        usage = pb.Usage()
        async for message in stub.Generate(request, timeout=TIMEOUT_S):
            print(message.text, end="", flush=True)
            usage = message.usage
        print(f"\n[{model.name}: {usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
