"""A device that keeps NCCL's rules over sockets, so that all of the plane but cupy's calls runs without one, between two processes too.

The rules: a join waits for the other rank without a limit; groups of one communicator go in the order of posting; a send moves nothing
before the other rank has posted its receive, and both are done together; the first group of a communicator is not even posted before the
other rank posts its own; ranks that post different things break the communicator (NCCL would hang or mix up bytes); so does the end of the
other rank; an abort ends what was posted, at once and on this side alone, and nothing is written after it.
"""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Final

from cluster.errors import TransferError
from cluster.kv_transfer.nccl_device import MAX_GROUP_ROWS, Rows

VERSION: Final = 23203
_ID_BYTES: Final = 128  # as an ncclUniqueId
_SECRET_BYTES: Final = 16
_HEADER: Final = struct.Struct(">?II")  # whether the rank sends, rows, bytes of a row
_DONE: Final = b"."


class SocketDevice:
    """`cluster.kv_transfer.nccl_device.Device`; needs no torch device."""

    version = VERSION

    def __init__(self) -> None:
        self._listeners: dict[bytes, socket.socket] = {}

    def unique_id(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        name = struct.pack(">H", listener.getsockname()[1]) + secrets.token_bytes(_SECRET_BYTES)
        unique_id = name.ljust(_ID_BYTES, b"\0")
        self._listeners[unique_id] = listener
        return unique_id

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> SocketCommunicator:
        listener = self._listeners.pop(unique_id, None)
        if num_ranks == 1:
            if listener is not None:
                listener.close()
            return SocketCommunicator(None)
        try:
            return SocketCommunicator(_join(unique_id) if listener is None else _accept(listener, unique_id))
        except OSError as error:
            raise TransferError(f"the other rank cannot be reached: {error}") from error


@dataclass
class _Group:
    send: Rows | None
    receive: Rows | None
    done: Event = field(default_factory=Event)


class SocketCommunicator:
    """`cluster.kv_transfer.nccl_device.Communicator`. A thread stands for the stream; without a link the rank sends to itself."""

    def __init__(self, link: socket.socket | None) -> None:
        self._link = link
        self._groups: SimpleQueue[_Group | None] = SimpleQueue()
        self._met = Event()  # the other rank has posted its first group, or there is none to wait for any more
        self._error: str | None = None
        self._aborted = False
        self._aborting = Lock()
        self._stream = Thread(target=self._run, name="socket-stream", daemon=True)
        self._stream.start()

    def post(self, *, send: Rows | None = None, receive: Rows | None = None) -> _Group:
        self._check()
        assert (send is None) != (receive is None) or self._link is None
        for rows in (send, receive):
            assert rows is None or (rows.tensor.is_contiguous() and len(rows.indexes) <= MAX_GROUP_ROWS)
        group = _Group(send, receive)
        self._groups.put(group)
        self._met.wait()
        self._check()
        return group

    def is_done(self, group: object) -> bool:
        assert isinstance(group, _Group)
        self._check()
        return group.done.is_set()

    def abort(self) -> None:
        with self._aborting:
            if self._aborted:
                return
            self._aborted = True
            self._groups.put(None)
            if self._link is not None:
                with suppress(OSError):  # the other rank was faster
                    self._link.shutdown(socket.SHUT_RDWR)
            self._met.set()
            self._stream.join()
            if self._link is not None:
                self._link.close()

    def _check(self) -> None:
        if self._aborted:
            raise TransferError("the communicator was aborted")
        if self._error is not None:
            raise TransferError(self._error)

    def _run(self) -> None:
        try:
            while (group := self._groups.get()) is not None and not self._aborted:
                self._move(group)
                group.done.set()
        except (OSError, ValueError) as error:
            self._error = f"NCCL's remote error: {error}"
        finally:
            self._met.set()

    def _move(self, group: _Group) -> None:
        if self._link is None:
            _copy(group)
            self._met.set()
            return
        rows = group.send or group.receive
        assert rows is not None
        num_rows, row_bytes = len(rows.indexes), rows.tensor.shape[1]
        self._link.sendall(_HEADER.pack(group.send is not None, num_rows, row_bytes))
        other = _HEADER.unpack(_receive(self._link, _HEADER.size))
        if other != (group.send is None, num_rows, row_bytes):
            raise ValueError(f"the ranks post different groups: {num_rows} rows of {row_bytes} bytes here, there {other}")
        self._met.set()
        views = [rows.tensor[index].numpy().data for index in rows.indexes]
        for view in views:
            if group.send is not None:
                self._link.sendall(view)
            else:
                _receive_into(self._link, view)
        if group.send is not None:
            _receive(self._link, len(_DONE))
        else:
            self._link.sendall(_DONE)


def _copy(group: _Group) -> None:
    assert group.send is not None and group.receive is not None
    for source, destination in zip(group.send.indexes, group.receive.indexes, strict=True):
        group.receive.tensor[destination] = group.send.tensor[source]


def _join(unique_id: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", struct.unpack_from(">H", unique_id)[0]))
    link.sendall(unique_id)
    _receive(link, len(_DONE))
    return link


def _accept(listener: socket.socket, unique_id: bytes) -> socket.socket:
    with listener:
        link, _ = listener.accept()
    if _receive(link, _ID_BYTES) != unique_id:
        link.close()
        raise OSError("somebody else has joined")
    link.sendall(_DONE)
    return link


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(link, memoryview(data))
    return bytes(data)


def _receive_into(link: socket.socket, view: memoryview) -> None:
    while view:
        num_bytes = link.recv_into(view)
        if num_bytes == 0:
            raise OSError("the other rank is gone")
        view = view[num_bytes:]
