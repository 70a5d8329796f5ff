"""Hands a file descriptor to other processes of the host over an abstract Unix socket: no file, so nothing is left after a kill -9.

1. the reader connects and sends the token it was told
2. the server compares it and answers with one byte and the descriptor (SCM_RIGHTS)
3. both keep the socket open: its end tells the one that the other is gone
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from typing import Final, cast

from cluster.errors import PlaneUnavailable

_TIMEOUT_S: Final = 5.0


class FdServer:
    """Gives `fd` to whoever knows `token`."""

    def __init__(self, fd: int, token: bytes) -> None:
        self.name = f"baton-kv-{secrets.token_hex(8)}"
        self._fd = fd
        self._token = token
        self._server: asyncio.Server | None = None
        self._clients: set[_Client] = set()

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self.name}")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Client(self._fd, self._token, self._clients), sock=listener)

    async def close(self) -> None:
        """Ends the socket and those of all readers. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        clients = list(self._clients)
        for client in clients:
            client.abort()
        await asyncio.gather(*(client.lost for client in clients))


class _Client(asyncio.Protocol):
    """One reader's socket, at the server."""

    def __init__(self, fd: int, token: bytes, clients: set[_Client]) -> None:
        self._fd = fd
        self._token = token
        self._clients = clients
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, in a Serve replica, is none by its class
        self._clients.add(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        if len(self._received) < len(self._token):
            return
        if not hmac.compare_digest(self._received, self._token):
            self.abort()
            return
        # The loop's own wrapper of the socket cannot send descriptors.
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as raw:
            socket.send_fds(raw, [b"\0"], [self._fd])

    def connection_lost(self, _error: Exception | None) -> None:
        self._clients.discard(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()


async def receive_fd(name: str, token: bytes) -> tuple[socket.socket, int]:
    """The open socket to the server `name` and the descriptor it gave; the caller closes both.

    Raises:
        PlaneUnavailable: no such server on this host, or it refuses the token.
    """
    loop = asyncio.get_running_loop()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.setblocking(False)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await loop.sock_connect(link, f"\0{name}")
            await loop.sock_sendall(link, token)
            await _readable(link)
        _, fds, _, _ = socket.recv_fds(link, 1, 1)
        if not fds:
            raise PlaneUnavailable("the peer refused the token of its shared memory")
        os.set_inheritable(fds[0], False)
    except (OSError, TimeoutError) as error:
        link.close()
        raise PlaneUnavailable(f"no shared memory of the peer on this host: {str(error) or 'no answer'}") from error
    except BaseException:
        link.close()
        raise
    return link, fds[0]


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(link, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(link)
