"""A worker's own gRPC endpoint. It binds to a free port, so that two lives of a worker hardly ever share an address."""

from __future__ import annotations

from collections.abc import Callable

from grpc import aio

from cluster import rpc
from cluster.errors import ConfigError
from cluster.worker.open_calls import OpenCalls


class Endpoint:
    """The server of one worker: services are added, then it starts, and answers until it is closed."""

    def __init__(self, host: str, secret: str, published: str | None = None) -> None:
        """Binds at once, since the address is part of what the services say of themselves.

        Args:
            host: address to bind to.
            secret: the cluster secret that callers must know.
            published: the host by which others reach it; default: `host`.

        Raises:
            ConfigError: the host is no address of this machine.
        """
        self._calls = OpenCalls()
        self._server = rpc.server(secret, self._calls)
        try:
            port = self._server.add_insecure_port(_host_port(host, 0))
        except RuntimeError as error:
            raise ConfigError(f"cannot bind to {host}: {error}", param="host") from error
        self.address = _host_port(published or host, port)

    def add(self, register: Callable[[aio.Server], None]) -> None:
        """Lets `register` add a service to the server."""
        register(self._server)

    async def start(self) -> None:
        await self._server.start()

    async def close(self, grace_s: float = 0.0) -> None:
        """Gives the port back and ends the calls that are left: those that have not ended by themselves after `grace_s`. Idempotent.

        New calls are taken until then: a server that stops tells its clients so, and they would give up what they wait for.
        """
        await self._calls.wait_none(grace_s)
        await self._server.stop(grace=None)


def published_host(host: str, node_address: str) -> str:
    """The host by which others reach what is bound to `host` on the node at `node_address`."""
    return node_address if host in ("0.0.0.0", "::") else host


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
