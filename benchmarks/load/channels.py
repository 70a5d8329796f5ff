"""Connections to one gRPC server: each call in flight has its own, as over HTTP, until there are `MAX_CHANNELS`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from grpc import aio

from cluster.pb.inference_pb2_grpc import InferenceStub

# Calls share a connection's flow control, and servers that share a port (several gateways on a node) share it by connection.
MAX_CHANNELS: Final = 32
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # or equal channels would share one connection
    ("grpc.enable_retries", 0),  # a failure is counted, not repeated
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(slots=True, eq=False)
class _Connection:
    channel: aio.Channel
    stub: Any  # the asyncio one, whose generated type only type checkers know
    num_calls: int = 0


class Channels:
    """Opens connections as calls need them, and keeps them until `close`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._connections: list[_Connection] = []

    def __len__(self) -> int:
        return len(self._connections)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        """The stub of the connection with the fewest calls, for one call."""
        connection = min(self._connections, key=lambda known: known.num_calls, default=None)
        if connection is None or (connection.num_calls and len(self) < MAX_CHANNELS):
            connection = self._connect()
        connection.num_calls += 1
        try:
            yield connection.stub
        finally:
            connection.num_calls -= 1

    async def close(self) -> None:
        """Cancels what is open."""
        for connection in self._connections:
            await connection.channel.close(None)
        self._connections.clear()

    def _connect(self) -> _Connection:
        channel = aio.insecure_channel(self._target, options=_OPTIONS)
        self._connections.append(_Connection(channel, InferenceStub(channel)))
        return self._connections[-1]
