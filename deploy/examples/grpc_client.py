"""Baton over gRPC from blocking code: `python -m deploy.examples.grpc_client "The capital of France is"`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Final

import grpc

from cluster.pb import inference_pb2 as pb
from cluster.pb.inference_pb2_grpc import InferenceStub

TIMEOUT_S = 120.0
PATIENCE_S = 1.0

# Outlives a gateway that dies: gRPC waits for the next one, and sends a call again while nothing of its answer has come.
RETRIES: Final = {
    "methodConfig": [
        {
            "name": [{"service": "baton.v1.Inference"}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.5s",
                "backoffMultiplier": 3,
                "maxBackoff": "8s",
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS: Final = (("grpc.service_config", json.dumps(RETRIES)), ("grpc.max_reconnect_backoff_ms", 2000))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the text as it comes."""
    parser = argparse.ArgumentParser(description="Complete a text over gRPC.")
    parser.add_argument("prompt")
    parser.add_argument("--target", default="127.0.0.1:9000", help="host:port of the gateway (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=32)
    options = parser.parse_args(arguments)
    with grpc.insecure_channel(options.target, options=OPTIONS) as channel:
        try:
            _await_ready(channel, options.target)
            _complete(InferenceStub(channel), options.prompt, options.max_tokens)
        except grpc.RpcError as error:
            raise SystemExit(f"{error.code().name}: {error.details()}") from error


def positive(text: str) -> int:
    """A count as the API takes it; argparse names the option of another one."""
    number = int(text)
    if not 0 < number < 2**31:
        raise ValueError(text)
    return number


def _await_ready(channel: grpc.Channel, target: str) -> None:
    """A gateway that is being started is worth waiting for; a wrong address should be seen."""
    try:
        grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)
    except grpc.FutureTimeoutError:
        say_waiting(target)


def say_waiting(target: str) -> None:
    """What is said after `PATIENCE_S`."""
    print(f"waiting for a gateway at {target}", file=sys.stderr)


def _complete(stub: InferenceStub, prompt: str, max_tokens: int) -> None:
    model = stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT_S)
    request = pb.GenerateRequest(model=model.name, text=prompt, max_tokens=max_tokens, temperature=0.0)
    usage = pb.Usage()
    for message in stub.Generate(request, timeout=TIMEOUT_S):
        print(message.text, end="", flush=True)
        usage = message.usage
    print(f"\n[{model.name}: {usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
