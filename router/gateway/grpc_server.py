"""The gateway's own gRPC server for clients, on the event loop of its replica.

Not Serve's gRPC proxy: that one can lose the cancel of a stream. Life: constructed, `start`, `close`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster import rpc
from cluster.config import BatonConfig
from cluster.errors import ConfigError
from cluster.pb import inference_pb2, inference_pb2_grpc
from router.gateway.gateway import Gateway
from router.gateway.grpc_health import HealthService
from router.gateway.grpc_service import InferenceService

INFERENCE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True, slots=True)
class GrpcSettings:
    """Where to listen, and how to stop."""

    host: str
    port: int  # 0: any
    shares_port: bool  # SO_REUSEPORT: the kernel spreads connections over the gateways of a node
    drain_s: float  # running calls may take this long after the server was closed

    @staticmethod
    def of(config: BatonConfig) -> GrpcSettings | None:
        """None: no gRPC."""
        gateway = config.gateway
        if gateway.grpc_port is None:
            return None
        # A single gateway keeps its port for itself: another Baton on it is an error, not a lottery.
        return GrpcSettings(gateway.grpc_host, gateway.grpc_port, gateway.replicas > 1, config.decode.drain_timeout_s)


class GrpcServer:
    """`baton.v1.Inference`, `grpc.health.v1` and reflection over one gateway."""

    def __init__(self, gateway: Gateway, settings: GrpcSettings) -> None:
        self._gateway = gateway
        self._settings = settings
        self._server: aio.Server | None = None
        self._health = HealthService(gateway, frozenset({INFERENCE}))

    async def start(self) -> int:
        """Listens; the port.

        Raises:
            ConfigError: it cannot.
        """
        settings = self._settings
        server = aio.server(options=self._options())
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(self._gateway), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((INFERENCE, _HEALTH, reflection.SERVICE_NAME), server)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            port = server.add_insecure_port(f"{host}:{settings.port}")
        except RuntimeError as error:
            raise ConfigError(f"gateway.grpc_port: cannot listen on {host}:{settings.port}", param="gateway.grpc_port") from error
        await server.start()
        self._server = server
        return port

    async def close(self) -> None:
        """No new calls; those that run get the drain time, then they are cancelled. Idempotent."""
        self._health.close()
        if self._server is not None:
            await self._server.stop(self._settings.drain_s)

    def _options(self) -> tuple[tuple[str, int], ...]:
        return (
            *rpc.KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients that wait in the queue may look whether we are there
            ("grpc.so_reuseport", int(self._settings.shares_port)),
            # The service refuses what is over the limit, with the error that HTTP gives; this only keeps memory bounded.
            ("grpc.max_receive_message_length", 2 * self._gateway.config.max_body_bytes + 2**16),
        )
